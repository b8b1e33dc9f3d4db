"""Independent implementations to hold the Gemma 4 plugin against; see ../check.py."""
