"""Seeded faults: each contract finds what it promises to find, and says so in words that name it."""

# ruff: noqa: E501 - a table with one fault per line
from __future__ import annotations

from pathlib import Path

import pytest
from kitrun import HERE, Outcome, run_pytest

FAULTS = {
    "drafters.py": {
        "TestPeeksAtTheTarget": ("test_propose_leaves_the_target_alone", "it ran the target's forward on the target's own state"),
        "TestOverwritesTheTarget": ("test_propose_leaves_the_target_alone", "it changed the target's state: tensor '1.keys'"),
        "TestAppendsToTheTarget": ("test_propose_leaves_the_target_alone", "it ran the target's forward on the target's own state"),
        "TestCommitsByItself": ("test_propose_leaves_the_target_alone", "it changed lane.tokens"),
        "TestDraftsBeyondTheBudget": ("test_its_own_drafts_give_the_plain_reply", "expected at most the budget"),
        "TestDraftsFloats": ("test_its_own_drafts_give_the_plain_reply", "found tokens of mlx.core.float32, expected int32"),
        "TestDraftsIdsOutsideTheVocabulary": ("test_its_own_drafts_give_the_plain_reply", "expected ids from 0 to 282"),
        "TestRaisesNowAndThen": ("test_its_own_drafts_give_the_plain_reply", "found it raised KeyError: 'row 9'"),
        "TestNeverDrafts": ("test_its_own_drafts_give_the_plain_reply", "found none at all, so nothing was tested"),
        "TestReportsAnotherTemperature": ("test_probs_are_the_distribution_drafted_from", "found another law, expected the one lane.draw returned"),
        "TestReportsTheLawOfAnotherStep": ("test_probs_are_the_distribution_drafted_from", "found the law of step 2, expected the one lane.draw returned"),
        "TestKeepsTheLawToItself": ("test_probs_are_the_distribution_drafted_from", "found probs None, expected the laws that lane.draw returned"),
        "TestDrawsFromAnotherLawThanItReports": ("test_probs_are_the_distribution_drafted_from", "expected the distribution each token was really drawn from"),
        "TestDropsTokensAfterDrawingThem": ("test_drafts_are_cut_by_what_was_known_before", "the token of a step to have no say in whether that step is kept"),
        "TestKeepsRejectedRows": ("test_a_rollback_equals_a_fresh_start", "expected the draft of a fresh request with these tokens"),
        "TestMiscountsAfterRollback": ("test_a_rollback_equals_a_fresh_start", "found it raised ValueError"),
        "TestRemembersOnTheDrafterObject": ("test_two_requests_do_not_see_each_other", "everything a request owns lives there, never on the drafter"),
        "TestTreatsEveryRowAsTheFirst": ("test_rows_of_a_batch_draft_as_they_do_alone", "expected the draft of the row alone"),
        "TestMiscountsPromptChunks": ("test_prompts_in_chunks_draft_alike", "first draft of a prompt of 26 tokens prefilled"),
        "TestIndexesItsOwnRejectedDrafts": ("test_what_was_rejected_is_forgotten", "its own drafts may have been rejected"),
        "TestDraftsAsManyForEveryRow": ("test_rows_of_a_batch_draft_as_they_do_alone", "per row"),
        "TestLooksItUpInAnotherRow": ("test_rows_of_a_batch_draft_as_they_do_alone", "expected the draft of the row alone"),
        "TestStandsOnePositionOff": ("test_drafts_equal_the_reference", "as the reference drafts"),
        "TestDraftsWorseThanItsOwnTarget": ("test_acceptance_is_as_declared", "positions of queries and keys (off by one?)"),
        "TestNeverReadsItsTaps": ("test_it_reads_the_taps_it_asks_for", "found the same draft and logits"),
    },
    "states.py": {
        "TestForgetsOneRow": ("test_rewind_equals_running_only_the_kept_rows", "found a difference: tensor '0.values'"),
        "TestKeepsOneRowLess": ("test_rewind_equals_running_only_the_kept_rows", "ShortByOne.rewind of rows at (0,) to keep [1]"),
        "TestCannotGoBackOnceTheWindowWrapped": ("test_rewind_equals_running_only_the_kept_rows", "found a difference: tensor '0.keys'"),
        "TestTakesAllRowsBackAlike": ("test_rows_of_a_batch_are_taken_back_one_by_one", "AllAlike.rewind of rows at (1, 5, 17) to keep [0, 4, 2]"),
        "TestTakesAnyKeep": ("test_a_rewind_that_cannot_be_done_changes_nothing", "expected a ValueError"),
        "TestSharesItsBuffer": ("test_a_copy_shares_nothing", "the copy may share no array that is written in place"),
        "TestForgetsItsTapeInAFile": ("test_save_and_load_keep_everything", "saved and loaded between a block and its rewind"),
        "TestRecurrenceThatStays": ("test_rewind_equals_running_only_the_kept_rows", "tensor '0.h'"),
        "TestHoardsItsTapes": ("test_it_does_not_grow", "a new mark frees the old one"),
        "TestSelectsInAnotherOrder": ("test_rows_can_be_selected_and_merged_again", "after select([2, 0])"),
        "TestDependsOnTheNumberOfRows": ("test_a_block_equals_single_steps", "of a block of L=4"),
        "TestLooksAhead": ("test_every_accept_count_gives_the_plain_reply", "expected"),
        "TestAnswersEveryRowOfABatchWithTheFirst": ("test_rows_of_unequal_length_equal_the_rows_alone", "logits of row 1"),
        "TestTapsTheWrongLayer": ("test_taps_cost_nothing_and_equal_single_steps", "head(hidden)"),
        "TestShowsTheFirstRowOfAPrompt": ("test_taps_cost_nothing_and_equal_single_steps", "tap 'hidden' of prefill(last=True)"),
        "TestClaimsWhatItIsNot": ("test_it_describes_itself", "found it declared in the test class and False in target.capabilities"),
        "TestForgetsItsLastRow": ("test_every_accept_count_gives_the_plain_reply", "drafts right for"),
    },
}  # fmt: skip
CASES = [(file, cls) for file, classes in FAULTS.items() for cls in classes]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One inner run of every test that must find something."""
    nodes = [f"{HERE / 'faulty' / file}::{cls}::{FAULTS[file][cls][0]}" for file, cls in CASES]
    return run_pytest(tmp_path_factory.mktemp("faults"), nodes)


@pytest.mark.parametrize(("file", "cls"), CASES, ids=[cls for _, cls in CASES])
def test_the_fault_is_found_and_named(outcome: Outcome, file: str, cls: str) -> None:
    test, words = FAULTS[file][cls]
    found = outcome.failures(cls)
    assert test in found, outcome.output[-3000:]
    assert words in found[test]
    assert "Look at: " in found[test]


def test_every_faulty_class_is_listed() -> None:
    for file in ("drafters.py", "states.py"):
        text = (Path(HERE) / "faulty" / file).read_text()
        assert {line.split("(")[0][6:] for line in text.splitlines() if line.startswith("class Test")} == set(
            FAULTS[file]
        )
