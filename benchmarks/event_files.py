"""Compares event files of `lm train` with its log, as TensorBoard reads them: every number of every step, also after a stop.

    lm train --train README.md --steps 6 --save saved --log log.jsonl --tensorboard events
    lm train --train README.md --resume saved --steps 9 --log log.jsonl --tensorboard events
    pip install tensorboard
    python3 benchmarks/event_files.py log.jsonl events
"""

import json
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

NAMES = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/update_norm": "update_norm",
    "train/learning_rate": "learning_rate",
    "train/skipped": "skipped",
    "train/loss_scale": "loss_scale",
    "valid/loss": "valid_loss",
    "speed/seconds": "seconds",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/tflops": "tflops",
    "speed/utilization": "utilization",
}


def single(number):
    """The number in 32 bits, which event files have."""
    return struct.unpack("f", struct.pack("f", number))[0]


def main():
    log, folder = sys.argv[1:]
    lines = [json.loads(line) for line in open(log)]
    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    found = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    unknown = set(found) - set(NAMES)
    assert not unknown, f"unknown tags {unknown}"
    compared = 0
    for tag, name in NAMES.items():
        want = {line["step"]: single(line[name]) for line in lines if line.get(name) is not None}
        got = found.get(tag, {})
        assert got == want, f"{tag}: {got}, and the log has {want}"
        compared += len(want)
    print(f"TensorBoard reads {compared} numbers of {len(lines)} steps, all as in the log")


if __name__ == "__main__":
    main()
