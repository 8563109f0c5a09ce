"""What the run from a pack makes of its processes' outputs; the run itself needs a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import serve_from_pack as serving  # noqa: E402

REPORT = """<testsuites><testsuite>
<testcase classname="tests.kernels.test_step" name="a"/>
<testcase classname="tests.kernels.test_step" name="b"><skipped message="no compiler"/></testcase>
<testcase classname="tests.kernels.test_step" name="c"><skipped message="no compiler"/></testcase>{more}
</testsuite></testsuites>"""
FAILED = '<testcase classname="tests.kernels.test_step" name="d"><failure message="x"/></testcase>'


def start(us: float, origin: str = "cache") -> serving.Found:
    calls = {"1": {"kernel": "chain", "us": us}}
    return {"origins": {origin: 3}, "first_draw_s": us, "warm_s": us, "launch_us": us, "calls": calls}


def test_a_report_counts_what_ran_and_why_the_rest_did_not(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(more=""))
    assert serving.outcome(report) == {"passed": True, "ran": 1, "failed": [], "skipped": {"no compiler": 2}}
    report.write_text(REPORT.format(more=FAILED))
    assert serving.outcome(report)["failed"] == ["tests.kernels.test_step::d"]
    assert not serving.outcome(report)["passed"]


def test_a_report_in_which_nothing_ran_is_no_pass(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(more="").replace('name="a"/>', 'name="a"><skipped message="x"/></testcase>'))
    assert not serving.outcome(report)["passed"]


def test_starts_of_one_way_are_medians() -> None:
    found = serving.medians([start(5.0), start(1.0), start(2.0)])
    assert found == start(2.0) | {"starts": 3}
    assert serving.medians([start(5.0), {"output": "Traceback"}]) == {"output": "Traceback"}


@pytest.mark.parametrize(
    ("origins", "way", "good"),
    [
        ({"pack some": 9}, serving.PACK, True),
        ({"pack some": 9, "compiled": 1}, serving.PACK, False),
        ({"cache": 9}, serving.COLD, False),
        ({"compiled": 9}, serving.COLD, True),
        ({"cache": 9}, serving.WARM, True),
        ({}, serving.PACK, False),
    ],
)
def test_kernels_that_came_from_elsewhere_are_told(origins: dict[str, int], way: str, good: bool) -> None:
    assert serving.comes_from([{"origins": origins}], way) == good


def test_an_output_without_an_object_is_kept() -> None:
    assert serving.last_object('warning\n{"a": 1}\n') == {"a": 1}
    assert serving.last_object("Traceback\nError: x") == {"output": "Traceback\nError: x"}
    assert serving.last_object("") == {"output": ""}


def test_one_failure_anywhere_is_a_failure() -> None:
    assert serving.verdicts({"passed": True, "tests": {"a": {"passed": False}}, "checks": [1]}) == [True, False]


def test_a_slow_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SECONDS", 0.2)
    output = serving.execute(["sh", "-c", "echo begun; exec sleep 60"], {})
    assert output == "begun\n\nno end within 0.2 s"


def test_the_table_has_a_line_for_each_way() -> None:
    lines = serving.table({serving.PACK: start(6.0), serving.COLD: start(20.0) | {"launch_us": None}}).splitlines()
    assert lines[2:] == [
        "| pack | 6.0 | 6.0 | 6.0 | 6.0 (1 rows, chain) |",
        "| compiler, cold | 20.0 | 20.0 |  | 20.0 (1 rows, chain) |",
    ]
