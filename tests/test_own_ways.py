"""What people write by hand in plain PyTorch ends as without a failure, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SCRIPTS, Jobs, few

from shared_core.faults import Fault
from shared_core.worker.variables.variables import OFF
from tests.support.runner import Mismatch, compare

SCRIPT = "own_ways.py"
LATE = {
    "libraries": [Fault(1, 6, "collective.before", "SIGKILL"), Fault(0, 13, "collective.after", "SIGKILL")],
    "settings": [Fault(1, 8, "collective.before", "SIGKILL"), Fault(0, 13, "collective.before", "SIGKILL")],
    "places": [Fault(1, 8, "collective.before", "SIGKILL"), Fault(0, 12, "collective.before", "SIGKILL")],
    "beside": [Fault(1, 9, "collective.before", "SIGKILL"), Fault(0, 12, "collective.before", "SIGKILL")],
    "again": [Fault(0, 4, "collective.before", "SIGKILL")],
    "numbers": [Fault(1, 9, "collective.before", "SIGKILL"), Fault(0, 13, "collective.before", "SIGKILL")],
    "epochs": [Fault(0, 9, "collective.before", "SIGKILL"), Fault(1, 18, "collective.before", "SIGKILL")],
    "adaptive": [Fault(1, 6, "collective.after", "SIGKILL", nth=5), Fault(0, 11, "collective.after", "SIGKILL")],
    "dealt": [Fault(1, 6, "collective.before", "SIGKILL", nth=6), Fault(0, 11, "collective.after", "SIGKILL", nth=5)],
    "hooked": [Fault(1, 6, "collective.after", "SIGKILL", nth=4), Fault(0, 11, "collective.before", "SIGKILL")],
    # The other rank has the next parameters when it fails.
    "by_hand": [Fault(1, 6, "collective.before", "SIGKILL", nth=2)],
}
NEVER = {"SWIFT_RECOVERY_STATE_PREIMAGES": "never"}
_ITERATOR = [Fault(1, 7, "collective.before", "SIGKILL")]


@pytest.mark.parametrize("part", few(LATE, "libraries", "again", "adaptive", "hooked", "by_hand"))
def test_it_ends_as_without_a_failure(part: str, jobs: Jobs) -> None:
    """State in objects of libraries and in places that are easily forgotten, settings of the process, an optimizer that
    is not attached, or that deals parameters out to ranks; groups that are ended and made again; a script that resumes
    from its own newest file, so that a replacement begins elsewhere; parameters that no optimizer steps; an optimizer
    whose step keeps more than tensors and asks the other ranks; what only hooks hold.
    """
    again = part == "again"  # plain gloo hangs now and then where a group is made again
    jobs.check(SCRIPT, args=[part], faults=LATE[part], reference_launcher="swiftrun" if again else "plain")


@pytest.mark.parametrize("part", few(["libraries", "settings", "places", "beside", "hooked"], "hooked"))
def test_without_the_capture_it_is_not_put_back(part: str, jobs: Jobs) -> None:
    """A control of the tests above."""
    with pytest.raises(Mismatch):
        jobs.check(SCRIPT, args=[part], faults=LATE[part][:1], env={OFF: "1"})


def test_without_the_state_at_the_step_boundary_a_replacement_has_newer_parameters(jobs: Jobs) -> None:
    """A control: nobody keeps the parameters of the failed worker's place, and the checksums notice it."""
    result = jobs.run(SCRIPT, args=["by_hand"], faults=LATE["by_hand"], env=NEVER)
    assert result.status == 1 and "ReplayDivergence" in result.stderr, result.tail()


def test_without_that_state_an_optimizer_has_what_it_has_seen_with_a_newer_one(jobs: Jobs) -> None:
    """A control: what its step keeps besides tensors follows from momenta that are too new."""
    with pytest.raises(Mismatch):
        jobs.check(SCRIPT, args=["adaptive"], faults=LATE["adaptive"][:1], env=NEVER)


def test_without_that_state_an_optimizer_that_deals_parameters_out_is_refused(jobs: Jobs) -> None:
    """A control: a replacement would have what another rank keeps."""
    result = jobs.run(SCRIPT, args=["dealt"], faults=LATE["dealt"][:1], env=NEVER)
    told = ("keep different optimizer state for it", "ReplicaMismatch")
    assert result.status == 1 and any(each in result.stderr for each in told), result.tail()


def test_optimizer_state_that_is_read_before_its_update_is_refused_by_name(jobs: Jobs) -> None:
    """The other rank has made the update when it fails."""
    fault = Fault(1, 6, "update.before", "SIGKILL")
    result = jobs.run(SCRIPT, args=["reads"], faults=[fault])
    compare(result, jobs.reference(SCRIPT, args=["reads"]))
    [restart] = result.kinds("restart")
    assert "reads the state of AdamW in a batch before that batch's update" in restart.fields["reason"], restart


def test_another_list_in_the_replacement_is_refused_by_name(jobs: Jobs) -> None:
    """A control: of a ``range`` a replacement is given the failed worker's, of a list it is not."""
    result = jobs.run(SCRIPT, args=["list"], faults=LATE["numbers"][:1])
    assert result.status == 1, result.tail()
    assert "reads a list of 11 " in result.stderr and "a list of 16 " in result.stderr, result.tail()


def test_an_iterator_of_a_loader_is_refused_by_name(jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, args=["iterator"], faults=_ITERATOR)
    compare(result, jobs.reference(SCRIPT, args=["iterator"]))
    [restart] = result.kinds("restart")
    assert "`items` (own_ways.py:" in restart.fields["reason"], restart
    assert "write job.steps(loader) in the place of iter(loader)" in restart.fields["reason"], restart


def test_a_module_that_is_divided_among_ranks_is_refused_by_name(jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, args=["divided"])
    assert result.status == 1 and "holds a DTensor, of which each rank has a part" in result.stderr, result.tail()


def test_a_loop_in_an_installed_package_is_the_scripts(jobs: Jobs, tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "trains"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text((SCRIPTS / "variables.py").read_text())
    script = tmp_path / "main.py"
    lines = ["import sys", f"sys.path.insert(0, {str(package.parent)!r})", "from trains import train", "kept = train()"]
    script.write_text("\n".join(lines) + "\n")
    jobs.check(str(script), args=["mean"], faults=[Fault(0, 17, "bucket", "SIGKILL")])


def test_loader_workers_that_persist_and_that_the_script_reads_itself_are_not_put_back(jobs: Jobs) -> None:
    """A replacement would start them again, and draw one number more."""
    faults = [Fault(1, 5, "collective.before", "SIGKILL")]
    result = jobs.run(SCRIPT, args=["lasting"], faults=faults)
    compare(result, jobs.reference(SCRIPT, args=["lasting"]))
    assert len(result.kinds("restart")) == 1 and "Make it with persistent_workers=False" in result.stderr, result.tail()
    with pytest.raises(Mismatch):  # a control
        jobs.check(SCRIPT, args=["lasting"], faults=faults, env={OFF: "1"})
