"""Sixteen prompts as people write them, cut to lengths around multiples of the block size."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_SERVICE = (
    "You are the assistant of a small public library. Answer in complete sentences, keep to the facts in the "
    "catalogue, and say so plainly when you do not know something. The library opens at nine in the morning, closes "
    "at six in the evening, and stays shut on Sundays and public holidays. Books may be borrowed for four weeks. "
)
"""Four prompts begin with this."""
_HARBOUR = (
    "The old harbour lies at the narrow end of the bay, where the river brings down sand every spring and the dredgers "
    "carry it away every autumn. For two hundred years the town lived from herring; then the herring went elsewhere, "
    "and the town learned to live from visitors. "
)
"""Three prompts begin with this."""

TEXTS_AND_LENGTHS = (
    ("The capital of France is the city of light", 5),
    ("Once upon a time, in a village at the edge of a dark forest, there lived a clockmaker who", 15),
    ("The three primary colours of light are red, green and blue. When all three are mixed, the result is", 16),
    ("To make a good vegetable soup, first chop two onions, three carrots and a stick of celery into small", 17),
    (
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n"
        "def factorial(n):\n    if n == 0:\n        return 1\n",
        31,
    ),
    (
        "SELECT customer.name, SUM(orders.total) AS spent FROM customer JOIN orders ON orders.customer_id = "
        "customer.id WHERE orders.placed_at > '2024-01-01' GROUP BY customer.name",
        32,
    ),
    (
        "Il était une fois, dans un petit village au bord de la mer, un vieux pêcheur qui ne savait pas lire. "
        "Un jour, en remontant ses filets, il trouva une bouteille",
        33,
    ),
    (
        "Die Donau entspringt im Schwarzwald und fließt durch zehn Länder, bevor sie in das Schwarze Meer mündet. "
        "An ihren Ufern liegen Wien, Bratislava, Budapest und Belgrad, und in jedem dieser Orte erzählt man sich",
        47,
    ),
    (
        "日本の首都は東京です。東京にはたくさんの人が住んでいて、毎日電車で仕事に行きます。春には桜が咲き、公園は花見の"
        "人でいっぱいになります。夏は暑く、花火を見るために川へ行く人が多いです。",
        48,
    ),
    (
        "Question: A train leaves the station at 9:40 and arrives at 12:15. It stops for 10 minutes at each of the 3 "
        "stations on the way. For how long does the train actually move?\nAnswer: Let us think step by step.",
        49,
    ),
    (_HARBOUR + "In the mornings, before the first of them wake,", 64),
    (_HARBOUR + "My grandmother, who gutted fish here as a girl, used to say", 65),
    (
        _HARBOUR
        + "The plan that the council published last week would move the fish market to the north quay, fill in "
        "the two smallest basins, and build three hundred flats with a view of the sea. Those who are for it say that",
        100,
    ),
    (
        _SERVICE + "A visitor asks: I found a book from your library on a bench in the park. What should I do with it, "
        "and may I read it first? The assistant answers: Thank you for asking! You did the right",
        112,
    ),
    (
        _SERVICE
        + "A visitor asks: My daughter is eight years old, loves whales, and reads a little above her age. She "
        "has already read everything you have in the children's room about the sea. What would you suggest next, and "
        "where do we find it in the building? The assistant answers: What a pleasure to",
        129,
    ),
    (
        _SERVICE
        + "A visitor asks: Hello! I am writing a history of the ferry that ran between the two banks before the "
        "bridge was built. I have the town's newspapers from 1890 to 1912, but nothing older, and the company's own "
        "papers burned in the fire of 1931. Are there maps, letters, or photographs in your collection that could help "
        "me, and may I copy them at home? The assistant answers: We do have",
        150,
    ),
)


def real_prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the prompts, each of its stated length. Raises ValueError for a text that is too short."""
    prompts = []
    for text, length in TEXTS_AND_LENGTHS:
        token_ids: list[int] = tokenizer.encode(text)
        if len(token_ids) < length:
            raise ValueError(f"{text[:40]!r}... has {len(token_ids)} tokens, not {length}")
        prompts.append(token_ids[:length])
    return prompts
