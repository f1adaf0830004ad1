"""Prints the tokens per second of every `step` case in a store, from its newest record."""

import sys

from paceline.records import RecordStore, latest_per_case

store = RecordStore(sys.argv[1])
for record in latest_per_case(store.read()):
    if record.kind == "step" and record.outcome == "ok":
        print(record.case["model"], record.metrics["tokens_per_s"].value)
