"""``python -m bench NAME [options]``: runs one benchmark."""

from __future__ import annotations

import importlib
import sys

from mlora_worker.runtime.allocator import keep_freed_memory

BENCHMARKS = {
    "throughput": "tokens per second of four tasks against PEFT, a packed run, padded batching",
    "quantised": "tokens per second of four tasks on a base in 4 bits against QLoRA; bytes of a weight",
    "preference": "time of four DPO tasks against TRL's DPOTrainer with PEFT, one after the other",
    "limit": "time of a step with eight adapters over that of the frozen base alone",
    "launches": "operators of a step with eight tasks over those with one",
    "bubble": "idle time of real pipelines and of the simulator against the formulae",
    "pipeline": "two ranks of one thread each against one",
    "baselines": "two ranks against GPipe and 1F1B of torch.distributed.pipelining",
    "wire": "bytes that two ranks exchange over the formula",
    "network": "two ranks over a shaped link against FSDP, tensor parallelism, GPipe and 1F1B",
    "oom": "random tasks against a hard memory budget",
    "memory": "predicted memory of microbatches over what was measured",
    "scheduler": "time of a decision, makespan over a bound, a trace against other ways to share GPUs",
    "preempt": "steps that an urgent task waits for another one's place",
    "data": "rows per second from a file to a first step over the tokenizers library alone",
    "interference": "training beside the preparation of a large file over training alone",
    "operator": "thousands of tasks before a real API server: answers, writes, memory, restart, first step",
    "fuzz": "hostile objects before a real API server: does one leave its namespace, or stop the operator?",
    "chaos": "ranks, operator and store that fail again and again: is anything lost?",
    "quality": "adapters made here against PEFT's own, on questions that neither was trained on",
    "roofline": "how long a step must take on a GPU, computed from shapes and a data sheet",
    "gpu": "one GPU: packed adapters against PEFT, one after the other",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print("usage: python -m bench NAME [options]\n", file=sys.stderr)
        for name, what in BENCHMARKS.items():
            print(f"  {name:12}{what}", file=sys.stderr)
        return 2
    keep_freed_memory()  # as a worker does: so all sides have it, also those whose users would not
    result = importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
    assert isinstance(result, int)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
