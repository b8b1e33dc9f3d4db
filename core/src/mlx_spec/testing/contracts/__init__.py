"""The contracts: one test class each, subclassed by the authors of plugins."""
