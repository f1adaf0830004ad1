"""Measures the rendezvous latency of one TCPStore or torchft lighthouse, by number of clients.

One server process and several client processes run on loopback; each client has its own connection
and thread. Clients of a TCPStore meet in two ways: by a counter, as in torch's barrier (each adds
one, and the last sets the key that all wait for), and by keys, as in a rendezvous that exchanges
addresses (each sets its own key and waits for all keys). Clients of a lighthouse meet by a quorum,
as at the start of every step of replicas. A round lasts from the first client's call to the last
client's return. Appends one `rendezvous` record per subject and number of clients to the store. The
lighthouse requires torchft.

    python -m studies.reliability.store_latency results/store-latency.jsonl \
        --subjects TCPStore lighthouse
"""

import datetime
import functools
import itertools
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from studies.harness.records import append_record, machine_case
from studies.harness.study import study_parser

TIMEOUT = datetime.timedelta(seconds=120)
HOST = "127.0.0.1"
# Stack of a thread that only waits for a socket; 8 MiB each would be too much for a thousand.
STACK_BYTES = 512 * 1024
Times = list[tuple[float, float]]


def serve_store(port: Any, ended: Any, num_clients: int) -> None:
    """Runs the store on loopback until `ended` is set."""
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen(4096)
    number = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    store = dist.TCPStore(
        HOST, number, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    port.value = number
    ended.wait()
    del store


def serve_lighthouse(port: Any, ended: Any, num_clients: int) -> None:
    """Runs a lighthouse on loopback until `ended` is set."""
    from torchft.coordination import LighthouseServer

    milliseconds = int(TIMEOUT.total_seconds() * 1000)
    lighthouse = LighthouseServer(
        bind=f"{HOST}:0",
        min_replicas=num_clients,
        join_timeout_ms=milliseconds,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=milliseconds,
    )
    port.value = int(lighthouse.address().rpartition(":")[2].rstrip("/"))
    ended.wait()
    lighthouse.shutdown()


def connect_to_store(port: int) -> dist.TCPStore:
    """Opens a connection to the store."""
    return dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def connect_to_lighthouse(port: int) -> Any:
    """Opens a connection to the lighthouse."""
    from torchft.coordination import LighthouseClient

    return LighthouseClient(f"http://{HOST}:{port}", TIMEOUT)


def meet_by_counter(store: dist.TCPStore, name: str, rank: int, world_size: int) -> None:
    """Increments the counter and waits; the last client releases all."""
    if store.add(f"{name}/count", 1) == world_size:
        store.set(f"{name}/all", "here")
    store.wait([f"{name}/all"], TIMEOUT)


def meet_by_keys(store: dist.TCPStore, name: str, rank: int, world_size: int) -> None:
    """Sets this client's key and waits for the keys of all clients."""
    store.set(f"{name}/{rank}", "an address")
    store.wait([f"{name}/{other}" for other in range(world_size)], TIMEOUT)


def meet_by_quorum(lighthouse: Any, name: str, rank: int, world_size: int) -> None:
    """Requests a quorum."""
    lighthouse.quorum(str(rank), TIMEOUT, step=int(name.removeprefix("quorum")))


class Subject(NamedTuple):
    """A server, and how its clients connect and meet."""

    serve: Callable[[Any, Any, int], None]
    connect: Callable[[int], Any]
    ways: dict[str, Callable[[Any, str, int, int], None]]
    """Functions by which clients meet, by name."""


SUBJECTS = {
    "TCPStore": Subject(
        serve_store, connect_to_store, {"counter": meet_by_counter, "keys": meet_by_keys}
    ),
    "lighthouse": Subject(serve_lighthouse, connect_to_lighthouse, {"quorum": meet_by_quorum}),
}


def call(meet: Callable[[], None], gate: threading.Barrier, times: Times) -> None:
    """Meets once all threads of this process are ready, and appends the start and end times."""
    gate.wait()
    began = time.monotonic()
    meet()
    times.append((began, time.monotonic()))


def connect(subject: Subject, port: int, num_clients: int) -> tuple[list[Any], Times]:
    """Opens the connections of one process one after another; returns them and their times."""
    clients, times = [], []
    for _ in range(num_clients):
        began = time.monotonic()
        clients.append(subject.connect(port))
        times.append((began, time.monotonic()))
    return clients, times


def be_clients(
    name: str,
    ranks: list[int],
    world_size: int,
    rounds: int,
    port: int,
    together: Any,
    results: Any,
) -> None:
    """Runs several clients; puts the start and end times of all calls into `results`."""
    threading.stack_size(STACK_BYTES)
    # Wait until all processes have imported torch.
    together.wait()
    subject = SUBJECTS[name]
    clients, connected = connect(subject, port, len(ranks))
    taken: dict[str, list[Times]] = {"connect": [connected], **{way: [] for way in subject.ways}}
    for way, number in itertools.product(subject.ways, range(rounds)):
        times: Times = []
        gate = threading.Barrier(len(ranks) + 1)
        threads = []
        for client, rank in zip(clients, ranks, strict=True):
            meet = functools.partial(subject.ways[way], client, f"{way}{number}", rank, world_size)
            threads.append(threading.Thread(target=call, args=(meet, gate, times)))
        for thread in threads:
            thread.start()
        together.wait()
        gate.wait()
        for thread in threads:
            thread.join()
        taken[way].append(times)
    results.put(taken)
    together.wait()


def measure(name: str, num_clients: int, num_processes: int, rounds: int) -> dict[str, list[float]]:
    """Returns samples of each metric, one per round."""
    context = multiprocessing.get_context("spawn")
    port, ended = context.Value("i", 0), context.Event()
    server = context.Process(
        target=SUBJECTS[name].serve, args=(port, ended, num_clients), daemon=True
    )
    server.start()
    while port.value == 0 and server.is_alive():
        time.sleep(0.01)
    together, results = context.Barrier(num_processes), context.Queue()
    clients = [
        context.Process(
            target=be_clients,
            args=(
                name,
                list(range(first, num_clients, num_processes)),
                *(num_clients, rounds, port.value, together, results),
            ),
            daemon=True,
        )
        for first in range(num_processes)
    ]
    for client in clients:
        client.start()
    every = [results.get(timeout=600) for _ in clients]
    for client in clients:
        client.join()
    ended.set()
    server.join()
    return _metrics(every)


def _metrics(every: list[dict[str, list[Times]]]) -> dict[str, list[float]]:
    metrics: dict[str, list[float]] = {}
    for way in every[0]:
        for parts in zip(*(each[way] for each in every), strict=True):
            calls = [call for part in parts for call in part]
            median = statistics.median(end - begin for begin, end in calls)
            metrics.setdefault(f"{way}_median_client_s", []).append(median)
            # Connections are opened one after another, and torch resolves host names: without a
            # name server, a few take seconds.
            if way != "connect":
                lasted = max(end for _, end in calls) - min(begin for begin, _ in calls)
                metrics.setdefault(f"{way}_time_s", []).append(lasted)
    return metrics


def main() -> int:
    """Measures, prints and records the latencies."""
    parser = study_parser(__doc__)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=["TCPStore"])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for subject, num_clients in itertools.product(arguments.subjects, arguments.clients):
        numbers = measure(subject, num_clients, arguments.processes, arguments.rounds)
        case = {
            "subject": subject,
            "clients": num_clients,
            "processes": arguments.processes,
            "rounds": arguments.rounds,
            **machine_case(),
        }
        append_record(arguments.store, "rendezvous", case, numbers)
        shown = {name: f"{statistics.median(each) * 1e3:.1f} ms" for name, each in numbers.items()}
        print(f"{subject}, {num_clients} clients: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
