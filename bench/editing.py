"""Texts to be copied with one name changed, for `cpu.py`: what prompt lookup is made for."""

from __future__ import annotations

TEXTS = (
    "The harbour of Lindow was built three hundred years ago, when the river still carried timber from the hills to "
    "the sea. Every morning the old bell rang twice, once for the tide and once for the market, and the fishermen of "
    "Lindow pushed their boats into the grey water before the sun had cleared the roofs. The women sorted the catch "
    "on long wooden tables, and the children carried baskets of herring up the narrow steps to the smoke houses. When "
    "the storms came in November nobody left the harbour for weeks, and the whole town mended nets by the fire and "
    "told stories about the winter of the great ice.",
    "Our library in Marwick opens at nine and closes at six, except on Sundays, when the doors stay shut all day. You "
    "may borrow up to seven books for three weeks, and you may extend the loan twice unless another reader has asked "
    "for the same title. Please keep your card with you, because the staff cannot look up your number by name. The "
    "reading room on the second floor is for quiet work only; telephones, food and conversation belong in the garden "
    "or in the hall downstairs. Books that come back late cost ten cents a day, and a lost card costs two dollars.",
    "To bake the bread of the Hollen valley, mix five hundred grams of flour with three hundred grams of warm water, "
    "ten grams of salt and a small spoon of yeast. Knead the dough for ten minutes until it is smooth, then let it "
    "rest under a damp cloth for two hours in a warm place. Fold it four times, shape it into a round loaf and let it "
    "rest again for forty minutes. Heat the oven as far as it will go, cut a cross into the top of the loaf and bake "
    "it for thirty five minutes until the crust is dark and the bottom sounds hollow when you knock on it.",
)
CHANGES = (("Lindow", "Harwell"), ("Marwick", "Stonely"), ("Hollen", "Arden"))


def ask(turn: int) -> str:
    """A request to copy one of the texts with one name changed."""
    text, (old, new) = TEXTS[turn % len(TEXTS)], CHANGES[turn % len(TEXTS)]
    return f"Repeat the following text exactly, but replace {old} with {new}. Write nothing else.\n\n{text}"
