"""The matrix of what can go wrong in a roll: how it is made to happen, what should result, which test shows it.

A row without a test says what is missing. Numbers are those of the specification.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

_HOSTS = "tests/pools/test_roll_hosts.py"
_STEPS = "tests/unit/pool/test_roll_steps.py"
_ROLL = "tests/pools/test_roll.py"
_DEADLINE = "tests/unit/pool/test_roll_deadlines.py"
_DRAIN = "tests/pools/test_drain.py"
_INSTANCE = "tests/unit/pool/test_scale_set_roll.py"
_SET = "tests/unit/pool/test_scale_set.py"
_REFUSED = "tests/unit/pool/test_scale_set_refusals.py"
_WAVES = "tests/unit/pool/test_rolling.py"


class Row(NamedTuple):
    """A failure; ``tests`` are given as `FILE::FUNCTION`, ``missing`` is what none of them shows."""

    number: int
    failure: str
    expected: str
    tests: tuple[str, ...]
    missing: str = ""


MATRIX = (
    Row(
        1,
        "the policy isn't Manual, upgrades by itself, Flexible, `latest`, ephemeral; or flips between plan and PATCH",
        "refused in the plan, and again right before the PATCH",
        (
            f"{_REFUSED}::test_azure_must_not_replace_instances_by_itself",
            f"{_REFUSED}::test_a_policy_that_flips_is_seen_right_before_the_model_is_changed",
        ),
    ),
    Row(
        2,
        "another changes the set between reading and PATCH (412)",
        "read again; sent once more, unless image or mode differ",
        (
            f"{_SET}::test_another_field_that_somebody_changed_meanwhile_is_kept",
            f"{_SET}::test_an_image_or_a_mode_that_somebody_changed_meanwhile_stops",
        ),
    ),
    Row(
        3,
        "the autoscaler's operation preempts ours, or refuses it (409)",
        "waited for with back-off, settled by reading",
        (
            f"{_INSTANCE}::test_an_operation_that_another_preempts_is_settled_by_reading",
            f"{_INSTANCE}::test_a_refusal_that_passes_is_waited_for",
            f"{_INSTANCE}::test_a_refusal_that_never_passes_ends",
        ),
    ),
    Row(
        4,
        "429 to reimages",
        "hosts wait, empty and cordoned",
        (f"{_INSTANCE}::test_a_refusal_that_passes_is_waited_for",),
    ),
    Row(
        5,
        "the answer to a POST is lost, which was accepted",
        "found out by reading; one reimage",
        (
            f"{_INSTANCE}::test_a_lost_answer_is_never_answered_by_sending_again",
            f"{_INSTANCE}::test_killed_at_any_request_another_driver_goes_on",
        ),
    ),
    Row(
        6,
        "a POST is lost, and never arrived",
        "sent again after two looks at an untouched instance",
        (f"{_INSTANCE}::test_a_request_that_never_arrived_is_sent_again_after_two_looks_a_minute_apart",),
    ),
    Row(
        7,
        "an operation fails with a code",
        "the code is the failure's signature; three of a kind stop the run",
        (
            f"{_INSTANCE}::test_an_operation_that_fails_is_the_signature_of_the_failure",
            f"{_WAVES}::test_the_third_alike_failure_turns_all_scale_sets_back_at_once",
        ),
    ),
    Row(
        8,
        "a node comes back with the old build",
        "one repetition, then broken",
        (
            f"{_INSTANCE}::test_a_node_that_comes_back_with_the_old_build_is_repeated_once",
            f"{_HOSTS}::test_hosts_that_return_as_others",
        ),
    ),
    Row(
        9,
        "a node never comes back",
        "broken, cordoned, in the budget",
        (
            f"{_INSTANCE}::test_a_node_that_never_comes_back_ends",
            f"{_WAVES}::test_one_host_of_a_large_wave_has_a_fate",
        ),
    ),
    Row(
        10,
        "a node's preflight or suite fails",
        "broken with its code; goes back",
        (
            f"{_ROLL}::test_a_canary_that_fails_takes_everything_back",
            f"{_WAVES}::test_one_host_of_a_large_wave_has_a_fate",
        ),
    ),
    Row(
        11,
        "an instance is deleted, or is another machine",
        "gone; nothing is sent to the new one",
        (
            f"{_INSTANCE}::test_an_instance_that_is_deleted_or_replaced_meanwhile_is_gone",
            f"{_INSTANCE}::test_an_id_that_another_machine_has_is_not_touched",
            f"{_INSTANCE}::test_a_machine_that_is_replaced_while_others_are_upgraded_is_gone",
        ),
    ),
    Row(
        12,
        "a budget never allows an eviction",
        "skipped at the timeout, the budget named",
        (
            f"{_DRAIN}::test_a_budget_that_never_allows_it",
            f"{_DEADLINE}::test_a_disruption_budget_holds_after_the_deadline",
        ),
    ),
    Row(
        13,
        "evictions are refused for good, or by a namespace that ends; a pod reappears",
        "skipped, or waited for, with the pod's name",
        (
            f"{_DRAIN}::test_evictions_that_are_refused",
            f"{_DRAIN}::test_a_namespace_that_is_deleted_is_waited_for",
        ),
    ),
    Row(
        14,
        "a gang is on hosts of which some aren't drained",
        "all or none",
        (
            f"{_DRAIN}::test_a_gang_is_fenced_whole_or_not_at_all",
            "tests/unit/drain/test_drain_ladder.py::test_of_a_gang_all_are_evicted_or_none",
            f"{_DEADLINE}::test_gangs_are_evicted_whole_or_not_at_all",
        ),
    ),
    Row(
        15,
        "a pod is bound after the cordon, or after the last look",
        "waited for, or never started",
        (
            "tests/unit/drain/test_drain_ladder.py"
            "::test_a_host_is_empty_after_its_cordon_and_its_pods_have_settled",
            f"{_STEPS}::test_no_pod_can_start_between_the_last_look_and_the_request",
        ),
    ),
    Row(
        16,
        "a human uncordons a host in work",
        "skipped; not cordoned again",
        (
            "tests/unit/pool/test_pool_drains.py"
            "::test_a_busy_host_that_a_person_uncordoned_is_skipped_even_if_our_mark_stays_on_it",
            f"{_DRAIN}::test_a_host_that_a_human_uncordons",
        ),
    ),
    Row(
        17,
        "a human has cordoned a host before",
        "skipped, and still cordoned",
        (f"{_ROLL}::test_a_roll_around_jobs", f"{_DRAIN}::test_a_foreign_cordon_is_never_taken_away"),
    ),
    Row(
        18,
        "the API server is away for a while",
        "what runs is waited for; goes on",
        (
            f"{_STEPS}::test_an_api_server_that_is_away_is_waited_for",
            "tests/unit/pool/test_pool_drains.py::test_an_api_server_that_knows_no_rights_yet_is_asked_again",
        ),
    ),
    Row(
        19,
        "the API server is away for ever",
        "nothing starts; what is fenced is freed, and the roll goes on, once it answers again",
        (
            f"{_WAVES}::test_trouble_elsewhere_turns_no_image_back",
            f"{_WAVES}::test_a_control_plane_that_stays_red_keeps_no_host_from_work",
        ),
        "that the hosts which are left cordoned then are freed by `resume`, on a real control plane",
    ),
    Row(20, "Azure is away", "waited for; goes on", (f"{_STEPS}::test_azure_that_is_away_is_waited_for",)),
    Row(
        21,
        "the driver is killed at fifty points",
        "another one goes on; one reimage a host, nothing left behind",
        (
            f"{_ROLL}::test_fifty_kills",
            f"{_ROLL}::test_a_driver_that_is_killed_again_and_again",
            f"{_INSTANCE}::test_killed_at_any_request_another_driver_goes_on",
        ),
    ),
    Row(
        22,
        "the driver's machine is lost with its journal",
        "the plan goes on with it; without, what it fenced is freed, and hosts that may have the image are named",
        (
            "tests/unit/pool/test_salvage.py::test_only_who_has_the_image_from_before_is_freed",
            "tests/pools/test_roll.py::test_a_driver_that_is_gone_with_its_journals",
            f"{_INSTANCE}::test_services_that_a_driver_suspended_whose_journal_is_lost_are_resumed",
            f"{_WAVES}::test_who_already_runs_the_version_is_freed",
            f"{_STEPS}::test_a_host_that_a_lost_roll_left_with_the_new_image_takes_pods_again",
        ),
        "by the plan alone, hosts that the lost driver emptied count as unavailable only when it is their turn",
    ),
    Row(
        23,
        "a second roll of the same sets",
        "refused before the first cordon, naming the holder",
        (
            f"{_STEPS}::test_a_set_that_another_roll_drives_is_refused_before_anything_is_changed",
            "tests/unit/drain/test_drain_lease.py"
            "::test_who_comes_waits_for_one_that_is_gone_and_is_refused_by_one_that_is_there",
        ),
    ),
    Row(
        24,
        "hosts are added meanwhile",
        "they have their set's image, are named with it at the end, and are adopted in a wave of their own",
        (
            "tests/unit/pool/test_unplanned.py::test_instances_that_were_scaled_out_meanwhile_are_named",
            "tests/unit/pool/test_roll_fleet.py::test_instances_beside_the_plan_are_found_with_their_versions",
            f"{_INSTANCE}::test_an_operation_that_another_preempts_is_settled_by_reading",
            "tests/unit/pool/test_pool_plan.py::test_an_inventory_that_moved_on_makes_a_plan_stale",
        ),
    ),
    Row(
        25,
        "a host in work is removed",
        "gone; nothing of it is left",
        (f"{_STEPS}::test_a_host_that_is_scaled_in_is_gone_and_nothing_of_it_is_left",),
    ),
    Row(
        26,
        "the canary of one cell fails",
        "the run stops",
        # Stopping only its cell isn't intended: docs/decisions/0015.
        (f"{_ROLL}::test_a_canary_that_fails_takes_everything_back",),
    ),
    Row(
        27,
        "three hosts of a later wave fail alike",
        "stopped; models back first, then those hosts; healthy new ones stay",
        (f"{_WAVES}::test_the_third_alike_failure_turns_all_scale_sets_back_at_once",),
    ),
    Row(
        28,
        "going back fails, too",
        "quarantined, never a third time",
        (f"{_WAVES}::test_what_can_not_be_restored_stays_cordoned",),
    ),
    Row(
        29,
        "the previous version is gone",
        "refused in the plan; later, going back says so and ends",
        (
            f"{_REFUSED}::test_the_way_back_has_to_exist",
            f"{_STEPS}::test_the_way_back_is_gone_when_it_is_needed",
        ),
    ),
    Row(
        30,
        "the local disk has the old image's store",
        "reset or adopted",
        (
            "tests/disk/test_local_disk.py::test_life_of_a_disk",
            "tests/disk/test_preload_seed_history.py::test_another_images_data_root_gets_what_it_lacks",
        ),
        "that the node joins then: `tests/e2e/roll.py` shows it by hand, on one machine whose OS disk is swapped",
    ),
    Row(
        31,
        "the image is larger than the OS disk",
        "refused in the plan",
        (f"{_REFUSED}::test_an_image_has_to_fit_its_disk",),
    ),
    Row(
        32,
        "host keys are new after a reimage",
        "signed by the host CA; a roll without one is refused",
        (f"{_HOSTS}::test_hosts_that_return_as_others", f"{_HOSTS}::test_without_a_host_ca_nothing_begins"),
        "that the plan refuses it: it knows of no keys, so the run does",
    ),
    Row(
        33,
        "the clock is set back or on",
        "nobody waits for it; a journal is replayed",
        ("tests/unit/pool/test_simulated_resumes.py::test_a_clock_that_was_set_back_makes_nobody_wait",),
    ),
    Row(
        34,
        "a third of the nodes falls for another reason",
        "its own hosts stop the run, others hold it; who was so before is left alone, and counts as unavailable",
        (
            f"{_WAVES}::test_hosts_that_fall_with_their_new_image_turn_it_back",
            f"{_WAVES}::test_trouble_elsewhere_turns_no_image_back",
            "tests/unit/pool/test_simulation.py::test_nodes_that_fall_stop_the_run_at_once",
            f"{_WAVES}::test_nothing_begins_where_more_are_missing_than_may_be_away",
            f"{_WAVES}::test_who_is_missing_before_a_roll_is_left_alone_and_counts",
            "tests/unit/pool/test_survey.py::test_who_is_not_ready_or_has_no_node_is_missing",
        ),
    ),
    Row(
        35,
        "no new node joins, since their certificates have expired",
        "stopped among the canaries",
        (
            "tests/unit/pool/test_simulation.py::test_a_bad_image_reaches_only_the_canaries",
            f"{_WAVES}::test_a_canary_that_fails_stops_the_run_and_everything_goes_back",
        ),
    ),
)


def test_every_failure_has_a_row() -> None:
    assert [row.number for row in MATRIX] == list(range(1, 36))


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: f"R{row.number}")
def test_what_shows_it_is_there(row: Row, repo_root: Path) -> None:
    assert row.tests or row.missing
    for test in row.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (repo_root / file).read_text(), re.MULTILINE), test
