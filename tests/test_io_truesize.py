"""The real checkpoint's size, on a mock with true headers and holes for data: index, plans and where experts lie."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.daemon.model import names
from sluice.daemon.model.config import read_config
from sluice.io.experts import plan_cache
from sluice.io.store import Store
from sluice.io.trunk import plan_trunk
from sluice.tools.layout import FULL_K3
from sluice.tools.mini import make

OPEN = """
import json, re, sys, time
from sluice.io.store import Store
began = time.process_time()
store = Store.open(sys.argv[1])
seconds = time.process_time() - began
# Not ru_maxrss: a child's begins at what its parent held when it forked.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps({"tensors": len(store.tensors), "cpu_seconds": seconds, "peak_bytes": peak}))
"""


@pytest.fixture(scope="module")
def mock(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("truesize") / "k3"
    make(folder, FULL_K3, mock=True)
    yield folder
    for path in folder.glob("*.safetensors"):
        path.unlink()


@pytest.mark.slow
def test_the_index_of_497220_tensors_opens_in_little_time_and_memory(mock):
    program = subprocess.run([sys.executable, "-c", OPEN, str(mock)], capture_output=True, text=True, check=True)
    seen = json.loads(program.stdout)
    assert seen["tensors"] == 497_220
    assert seen["peak_bytes"] < 300e6
    # Processor time, and three times what it takes alone: the machine that runs this may be busy.
    assert seen["cpu_seconds"] < 15


@pytest.mark.slow
def test_plans_of_the_real_checkpoint_add_up_to_its_published_bytes(mock):
    store = Store.open(mock)
    config = read_config(mock)
    binding = names.bind(config, store.tensors)
    assert binding.experts is not None
    store.declare_experts(binding.experts)
    assert store.expert_bytes == 17_547_264
    assert store.expert_slot_bytes == 17_551_360  # one page more, as no expert begins on one
    assert len(store.expert(92, 895).reads) == 1
    offset = store.expert(1, 0).reads[0].extent.offset
    assert offset == 1_268_562_960
    assert store.expert(1, 2).reads[0].extent.offset == offset + 112 * 17_547_264

    def plan(budget: int):
        return plan_trunk(binding.order, store, budget, vectors=binding.vectors, row_tables=binding.row_tables)

    vectors = sum(store.tensors[name].nbytes for name in binding.vectors)
    nothing = plan(0)
    assert nothing.streamed_bytes_per_pass + vectors == 108_811_877_376 + 2_348_810_240 + 43_008
    assert nothing.ring_bytes < 160 * 2**20
    assert nothing.vectors_bytes < 70e6
    some = plan(2 * 2**30)
    assert 2 * 2**30 - 2 * some.slot_bytes < some.pinned_bytes <= 2 * 2**30
    assert plan_cache(store, 2**30).slots == 2**30 // 17_551_360
    # Every eighth of the depth has its share of what is pinned.
    per_part = [0] * 8
    for unit in some.units:
        if unit.pinned:
            per_part[unit.matrix * 8 // len(binding.order)] += unit.extent.nbytes
    assert max(per_part) < 2 * min(per_part)
