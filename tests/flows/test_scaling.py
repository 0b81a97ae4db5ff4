"""The scaling table: against sums written out, and the bounds that no cluster can pass."""

import json
import math

import pytest

from flows.cli import main
from flows.scaling import STAGES, WORKERS, Cluster, Job, Simulation, scaling
from lsp_core.ownership import orthogonal_costs

SMALL = Job(model="opt-125m", length=512, points=4, batch_sequences=12)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return Simulation(SMALL, Cluster())


def test_one_worker_does_all_the_work(simulation: Simulation) -> None:
    job, cluster, shapes, units = SMALL, simulation.cluster, simulation.shapes, simulation.units
    loading = cluster.start + shapes.stored_bytes / cluster.weight_bytes
    passed, head = shapes.forward(job.length) / cluster.flops, shapes.logits() / cluster.head_flops
    grams = sum(2 * u.dimension**2 * (len(u.members) if u.side == "output" else 1) for u in units) / cluster.flops64
    assert simulation.gather(1) == pytest.approx(loading + job.sequences * job.length * (passed + grams))
    assert simulation.evaluate(1) == pytest.approx(loading + job.test_sequences * job.length * (passed + head))
    assert simulation.orthogonal(1) == pytest.approx(
        sum(orthogonal_costs(units, simulation.removed).values()) / cluster.orthogonal_flops
    )


@pytest.mark.parametrize("stage", STAGES)
def test_workers_share_no_more_than_the_work(simulation: Simulation, stage: str) -> None:
    fixed = simulation.cluster.load(simulation.shapes.stored_bytes, 1)
    whole = getattr(simulation, stage)(1) - fixed
    for workers in WORKERS:
        taken = getattr(simulation, stage)(workers) - fixed
        assert taken >= whole / workers * (1 - 1e-12)
        assert taken <= whole + simulation.cluster.submission * workers


def test_more_processes_than_sequences_change_nothing(simulation: Simulation) -> None:
    assert simulation.train(SMALL.batch_sequences) == simulation.train(1024)
    assert simulation.train(6) < simulation.train(3)
    assert simulation.orthogonal(3) < simulation.orthogonal(1)


def test_an_exchange_goes_over_the_network_beyond_one_node() -> None:
    cluster = Cluster()
    assert cluster.exchange(1e9, 10, 1) == 0
    assert cluster.exchange(1e9, 10, 8) == pytest.approx(1e9 / cluster.node_bytes + 10 * cluster.latency * 3)
    assert cluster.exchange(1e9, 10, 9) == pytest.approx(
        1e9 / cluster.network_bytes + 10 * cluster.latency * math.log2(9)
    )


def test_the_command_prints_every_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "scaling", "opt-125m"]) == 0
    printed = capsys.readouterr().out
    assert f"{WORKERS[-1]:,}" in printed
    assert "flops64 4.5e+13" in printed
    content = scaling(SMALL)
    assert [row["workers"] for row in content["rows"]] == list(WORKERS)
    assert content["rows"][0]["speedup"] == 1
    assert json.loads(json.dumps(content)) == content


def test_a_model_that_is_no_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "scaling", "no-such-model"]) == 2
    assert "no-such-model is no folder with a config.json and no shape" in capsys.readouterr().err
