"""Rates are measured once for each device, dtype and width, survive damage, and add up to times."""

import json
from dataclasses import asdict, fields, replace

import psutil
import pytest
import torch

from lsp_core.shapes import Cost
from tasks import rates as module
from tasks.rates import FILE, Rates, device_memory, device_name, device_rates, seconds

WIDTH = 128


@pytest.fixture(scope="module")
def measured():
    return module.measure_rates("cpu", torch.float32, WIDTH)


@pytest.fixture
def record(tmp_path, measured):
    """A folder in which the rates of this CPU are on record, marked by an impossible date."""
    key = f"{device_name('cpu')}, float32, width {WIDTH}"
    marked = asdict(replace(measured, measured="1970-01-01"))
    (tmp_path / FILE).write_text(json.dumps({key: marked}))
    return tmp_path


def test_rates_are_positive_and_name_the_device(measured):
    assert str(torch.get_num_threads()) in measured.device
    assert all(getattr(measured, field.name) > 0 for field in fields(Rates) if field.type is float)


def test_what_is_measured_is_remembered(tmp_path):
    first = device_rates("cpu", torch.float32, width=WIDTH, folder=tmp_path / "new")
    written = (tmp_path / "new" / FILE).stat().st_mtime_ns
    assert device_rates("cpu", torch.float32, width=WIDTH, folder=tmp_path / "new") == first
    assert (tmp_path / "new" / FILE).stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]


def test_a_record_is_taken_without_a_measurement(record):
    assert device_rates("cpu", torch.float32, width=WIDTH, folder=record).measured == "1970-01-01"
    assert device_rates("cpu", torch.float32, width=WIDTH + 30, folder=record).measured == "1970-01-01"


def test_another_dtype_is_measured_and_the_first_kept(record):
    assert device_rates("cpu", torch.float64, width=WIDTH, folder=record).measured != "1970-01-01"
    assert len(json.loads((record / FILE).read_text())) == 2
    assert device_rates("cpu", torch.float32, width=WIDTH, folder=record).measured == "1970-01-01"


def test_another_width_is_measured(record):
    rates = device_rates("cpu", torch.float32, width=4 * WIDTH, folder=record)
    assert (rates.width, rates.measured != "1970-01-01") == (4 * WIDTH, True)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"rates"'])
def test_a_damaged_file_is_measured_again(record, text):
    (record / FILE).write_text(text)
    assert device_rates("cpu", torch.float32, width=WIDTH, folder=record).measured != "1970-01-01"
    assert len(json.loads((record / FILE).read_text())) == 1


@pytest.mark.parametrize(
    "change",
    [{"flops_per_second": 0.0}, {"flops_per_second": "fast"}, {"logits_per_second": -1.0}, {"more": 1}, {"device": 3}],
)
def test_a_damaged_record_is_measured_again(record, change):
    (key, rates), *_ = json.loads((record / FILE).read_text()).items()
    (record / FILE).write_text(json.dumps({key: rates | change, "another device": rates}))
    assert device_rates("cpu", torch.float32, width=WIDTH, folder=record).measured != "1970-01-01"
    assert "another device" in json.loads((record / FILE).read_text())


def test_seconds_add_up_and_are_linear(measured):
    counted = [field.name for field in fields(Cost) if field.name not in ("peak_bytes", "gradient_flops", "processes")]
    parts = [Cost(**{name: 3}) for name in counted]
    whole = Cost(**dict.fromkeys((*counted, "peak_bytes"), 6))
    assert all(seconds(part, measured) > 0 for part in parts)
    assert seconds(whole, measured) == pytest.approx(2 * sum(seconds(part, measured) for part in parts), rel=1e-12)
    assert seconds(Cost(peak_bytes=10**12), measured) == 0


def test_differentiated_passes_run_at_their_own_rate(measured):
    slower = replace(measured, gradient_flops_per_second=measured.flops_per_second / 2)
    plain, differentiated = Cost(flops=1e9), Cost(flops=1e9, gradient_flops=1e9)
    assert seconds(differentiated, slower) == pytest.approx(2 * seconds(plain, slower), rel=1e-12)


def test_memory_is_the_machine_s_or_the_smaller_limit_of_the_control_group(tmp_path, monkeypatch):
    total = psutil.virtual_memory().total
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(module, "CGROUP_LIMITS", (limit,))
    assert device_memory("cpu") == total
    for text, expected in (("max\n", total), ("1048576\n", 1048576), (f"{2 * total}\n", total)):
        limit.write_text(text)
        assert device_memory("cpu") == expected
