"""Comparison of torch's version numbers, given as text, so that torch need not be imported."""


def is_at_least(installed: str, first: tuple[int, int]) -> bool:
    """Whether a version such as "2.11.0+cu128" is ``first``, (major, minor), or newer."""
    return tuple(int(number) for number in installed.split(".")[:2]) >= first


def in_words(version: tuple[int, int]) -> str:
    """The version as users write it: "2.13"."""
    return ".".join(map(str, version))
