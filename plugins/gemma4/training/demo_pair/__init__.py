"""Training of the small target and drafter that the gemma4 plugin bundles as its demonstration pair."""
