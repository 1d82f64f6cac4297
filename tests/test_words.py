# SPDX-License-Identifier: Apache-2.0
"""Pages, messages and help use fewer and fewer of the words that a native engineer avoids."""

from __future__ import annotations

import pytest

from tests import words


@pytest.mark.parametrize("where", ["pages", "messages"])
def test_words_to_avoid_do_not_become_more(where: str) -> None:
    kept = words.kept()[where]
    more = {
        word: f"{count} instead of {kept[word]}: write {words.WORDS[word]}"
        for word, count in words.counts()[where].items()
        if count > kept[word]
    }
    assert more == {}
