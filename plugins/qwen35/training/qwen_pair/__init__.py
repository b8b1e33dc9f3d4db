"""Training of the small hybrid target and its own MTP head that the qwen35 plugin bundles."""
