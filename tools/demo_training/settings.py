"""What all demonstration pairs have in common: seed, vocabulary and the held-out modules."""

from __future__ import annotations

SEED = 20
VOCAB = 2048
PAD, EOS, BOS = 0, 1, 2
SPECIALS = ("<pad>", "<eos>", "<bos>")

HELD_OUT = (
    "cmd.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "email/header.py",
    "fractions.py",
    "graphlib.py",
    "http/cookies.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "tempfile.py",
    "textwrap.py",
    "wave.py",
    "xml/dom/minidom.py",
)
"""Modules, relative to the library directory, that no training step ever sees."""
