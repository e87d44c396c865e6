"""Logs of hand-made runs in every format that verl writes, and the tables that they should become."""

import json
import math
import struct
import zlib

import pandas
from torch.utils.tensorboard import SummaryWriter
from wandb.proto.wandb_internal_pb2 import Record

from verl_sis.study.run_logs import find_run_logs


def table(steps):
    """Hand-made, without the code under test."""
    names = sorted({name for metrics in steps.values() for name in metrics})
    columns = {name: [float(metrics.get(name, math.nan)) for metrics in steps.values()] for name in names}
    return pandas.DataFrame(columns, index=pandas.Index(list(steps), name="step", dtype="int64"))


def only(path):
    (log,) = find_run_logs(path)
    return log


def write_lines(path, *lines):
    """Rows as JSON, and texts as they are, in an encoding that can be wrong for JSON."""
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_text(text, encoding="latin-1")
    return path


def write_events(path, *scalars, **options):
    """An event file of the given name with (step, tag, value, wall time)."""
    scratch = path.with_name(f"scratch-{path.name}")
    with SummaryWriter(str(scratch)) as writer:
        for step, tag, value, time in scalars:
            writer.add_scalar(tag, value, step, walltime=time, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    next(scratch.iterdir()).rename(path)
    scratch.rmdir()
    return path


def write_wandb(path, payloads):
    """Frame records as LevelDB's log does, with wandb's header: an implementation of its own."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for payload in payloads:
        is_first = True
        while is_first or payload:
            room = 32768 - len(out) % 32768
            if room < 7:
                out += bytes(room)
                room = 32768
            chunk, payload = payload[: room - 7], payload[room - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, not payload]
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + chunk), len(chunk), kind) + chunk
            is_first = False
    path.write_bytes(out)
    return path


def history(step, as_keys=False, **values):
    record = Record()
    for name, value in {**values, "_step": step, "_runtime": 1.5, "_timestamp": 2.5}.items():
        item = record.history.item.add(value_json=json.dumps(value))
        # Releases before wandb-core wrote one key and no step of the record.
        if as_keys:
            item.key = name
        else:
            item.nested_key.append(name)
    if not as_keys:
        record.history.step.num = step
    return record.SerializeToString()


def jsonl_of_three(directory):
    return write_lines(directory / "run.jsonl", *({"step": step, "data": {"x": step}} for step in (1, 2, 3)))


def events_of_three(directory):
    return write_events(directory / "events.out.tfevents.1", *((step, "x", step, 1.0) for step in (1, 2, 3)))


def wandb_of_three(directory):
    return write_wandb(directory / "run-a.wandb", [history(step, x=step) for step in (1, 2, 3)])
