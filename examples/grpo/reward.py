"""Task: the last token of a prompt is an instruction, to write even tokens or to write odd ones."""

import random
from collections.abc import Sequence

EVEN, ODD = 4, 5
"""Instructions. The tokenizer keeps the lower tokens for itself."""
LAST = 63
PROMPT_LENGTH = 4


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return random prompts, the same ones for the same seed. The two instructions alternate."""
    generator = random.Random(seed)
    words = range(ODD + 1, LAST + 1)
    return [[*generator.choices(words, k=PROMPT_LENGTH - 1), (EVEN, ODD)[number % 2]] for number in range(count)]


def reward(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Return the share of the response's tokens that the instruction asks for; 0.5 by chance."""
    if not response:
        return 0.0
    return sum(token % 2 == prompt[-1] % 2 for token in response) / len(response)
