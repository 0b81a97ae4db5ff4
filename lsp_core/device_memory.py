"""What a device is called, and how much of its memory is free."""

import platform
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def processor_name(device: str) -> str:
    """Returns the name of the GPU, or of the processor."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_bytes(device: str) -> int | None:
    """Returns the bytes that can be allocated on ``device`` now, on a CPU within the cgroup; None if unknown."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    if not MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) * 1024]
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and limit.read_text().strip().isdecimal():
        free.append(int(limit.read_text()) - int(used.read_text()) + _reclaimable(CGROUP / "memory.stat"))
    return max(0, min(free))


def _reclaimable(path: Path) -> int:
    """Returns the bytes of cached files that a cgroup gives back when it needs them."""
    return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("inactive_file "))
