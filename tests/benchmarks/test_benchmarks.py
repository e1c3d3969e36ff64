"""The parts of the benchmarks that measure nothing: comparison with the kept ratios, tables, JSON."""

import json

import pytest

from benchmarks import check, floor, peers
from benchmarks.harness import Metric, document, ratio_by_rounds, table
from benchmarks.installed import Missing, python_of, version_of


def lower(ratio: float, name: str = "CPU") -> Metric:
    return Metric(name, "3 ms", "1 ms", ratio, better="lower")


def higher(ratio: float) -> Metric:
    return Metric("runs/s", "30/s", "10/s", ratio, better="higher")


@pytest.mark.parametrize("metric", [lower(2.29), lower(1.71), higher(1.71), higher(2.29)])
def test_small_differences_are_accepted(metric: Metric):
    assert check.differences({metric.name: 2.0}, [metric]) == ([], [])


@pytest.mark.parametrize("metric", [lower(2.31), higher(1.69)])
def test_a_worse_ratio_fails(metric: Metric):
    worse, better = check.differences({metric.name: 2.0}, [metric])
    assert len(worse) == 1
    assert metric.name in worse[0]
    assert not better


@pytest.mark.parametrize("metric", [lower(1.69), higher(2.31)])
def test_a_better_ratio_is_shown(metric: Metric):
    worse, better = check.differences({metric.name: 2.0}, [metric])
    assert not worse
    assert len(better) == 1


def test_kept_and_measured_ratios_have_the_same_names():
    worse, _ = check.differences({"CPU": 2.0, "gone": 1.0}, [lower(2.0), lower(2.0, "new")])
    assert sorted(sentence.split(":")[0] for sentence in worse) == ["gone", "new"]


def test_only_ratios_with_a_direction_are_guarded():
    assert check.ratios([lower(2.0), Metric("memory", "9 KiB"), Metric("rate", "1/s", "2/s", 0.5)]) == {"CPU": 2.0}


def measured(rounds: list[float]) -> peers.Measured:
    """A side that executes so many runs per second in each round, and takes a second by that number for the rest."""
    return peers.Measured(
        "a side",
        rates=rounds,
        seen=rounds,
        cpu=[{"web": 1 / rate, "PostgreSQL": 1 / rate} for rate in rounds],
        posts={clients: [[1 / rate] * 3 for rate in rounds] for clients in peers.CLIENTS},
        reads={clients: [[1 / rate] * 3 for rate in rounds] for clients in peers.CLIENTS},
        memory={"web": 2**20, "PostgreSQL": 2**20},
    )


def test_kept_ratios_are_those_that_are_measured():
    kept = json.loads(check.KEPT.read_text())
    cpu = [floor.Cpu(1, 1, 1)]
    found = {"floor": floor.metrics(cpu, cpu), "langgraph": peers.metrics(measured([1]), measured([1]))}
    assert {name: set(check.ratios(metrics)) for name, metrics in found.items()} == {
        name: set(ratios) for name, ratios in kept.items()
    }
    assert set(kept) == set(check.BENCHMARKS)


def test_ratios_to_a_peer():
    twice_as_fast = {metric.name: metric.ratio for metric in peers.metrics(measured([2.0]), measured([1.0]))}
    assert twice_as_fast.pop("runs/s, POST to completed") == 2.0
    assert twice_as_fast.pop("runs/s, as a client sees it") == 2.0
    assert twice_as_fast.pop("memory of all processes") == 1.0
    assert set(twice_as_fast.values()) == {0.5}


def test_a_ratio_is_the_median_of_the_rounds():
    # The machine was slow in the last round, for both sides.
    assert ratio_by_rounds([20.0, 22.0, 2.0], [10.0, 10.0, 1.0]) == 2.0


def test_the_floor_has_the_sum_and_each_part():
    found = floor.metrics([floor.Cpu(web=4, workers=8, database=9)], [floor.Cpu(web=2, workers=2, database=3)])
    assert [metric.ratio for metric in found] == [3.0, 3.0, 2.0, 4.0]


def test_figures_are_numbers():
    side = peers.figures(measured([100.0, 50.0]))
    assert json.loads(json.dumps(side)) == {
        "name": "a side",
        "runs_per_second": 75.0,
        "runs_per_second_seen": 75.0,
        "post_ms_by_clients": {"16": {"p50": 15.0, "p99": 20.0}, "1": {"p50": 15.0, "p99": 20.0}},
        "get_ms_by_clients": {"16": {"p50": 15.0, "p99": 20.0}, "1": {"p50": 15.0, "p99": 20.0}},
        "cpu_ms_per_run": {"web": 0.01, "PostgreSQL": 0.01},
        "memory_mib": {"web": 1, "PostgreSQL": 1},
    }


def test_a_table_and_its_json_have_the_same_values():
    lines = table([lower(2.0), Metric("memory", "9 KiB", target="≤ 10 KiB")]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines}) == 1
    assert cells[2:] == [["CPU", "3 ms", "1 ms", "2.00", ""], ["memory", "9 KiB", "", "", "≤ 10 KiB"]]
    found = document("a title", [lower(2.0)])
    assert found["benchmark"] == "a title"
    assert found["metrics"][0]["ratio"] == 2.0


@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_are_pinned(name: str):
    assert version_of(name)[-1].isdigit()


def test_a_peer_without_its_python_is_missing():
    with pytest.raises(Missing, match=r"3\.99"):
        python_of((3, 99))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file of kept ratios, and one benchmark that measures 2.0."""
    monkeypatch.setattr(check, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(check, "BENCHMARKS", {"floor": lambda runs, rounds: [lower(2.0)]})
    return check.KEPT


def test_renewed_ratios_are_kept(kept):
    check.main(["--renew"])
    assert json.loads(kept.read_text()) == {"floor": {"CPU": 2.0}}
    check.main()


def test_the_command_fails_if_a_ratio_is_worse(kept):
    kept.write_text(json.dumps({"floor": {"CPU": 1.7}}))
    with pytest.raises(SystemExit) as stopped:
        check.main()
    assert stopped.value.code not in (None, 0)
