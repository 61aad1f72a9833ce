"""The names of tags, as Azure accepts them."""

from __future__ import annotations

from image_builder.gallery import tags


def test_tags_are_each_others_and_azures() -> None:
    names = [value for name, value in vars(tags).items() if name.endswith("_TAG")]
    assert len(names) == len(set(names)) > 5
    assert all(len(name) <= 512 and not set(name) & set("<>%&\\?/") for name in names)
