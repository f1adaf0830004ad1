"""Tests that names are fetched once, and that fetching keeps neither owner nor program alive."""

import gc
import subprocess
import sys
import threading
import time
import weakref

from paceline.data.loader.cache import FetchAhead


class Owner:
    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.may_go_on = threading.Event()
        self.ahead = FetchAhead(self.fetch, 2)

    def fetch(self, name: str) -> None:
        self.may_go_on.wait()
        if name == "bad":
            raise ValueError(name)
        self.fetched.append(name)


def test_names_are_fetched_once_and_errors_left_to_others() -> None:
    owner = Owner()
    for _ in range(3):
        owner.ahead.ask(["bad", "a", "b", "c"])
    owner.may_go_on.set()
    for _ in range(500):
        if len(owner.fetched) == 3:
            break
        time.sleep(0.01)
    owner.ahead.close()
    assert sorted(owner.fetched) == ["a", "b", "c"]


def test_close_begins_nothing_more() -> None:
    owner = Owner()
    owner.ahead.ask(map(str, range(100)))
    threading.Timer(0.1, owner.may_go_on.set).start()
    owner.ahead.close()
    assert len(owner.fetched) <= 2


def test_an_owner_is_not_kept_alive() -> None:
    owner = Owner()
    owner.may_go_on.set()
    owner.ahead.ask(["a"])
    time.sleep(0.05)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "fetch-ahead"]


def test_a_program_ends_with_names_in_the_queue() -> None:
    program = (
        "import time\n"
        "from paceline.data.loader.cache import FetchAhead\n"
        "class Owner:\n"
        "    def fetch(self, name): time.sleep(0.2)\n"
        "owner = Owner()\n"
        "ahead = FetchAhead(owner.fetch, 2)\n"
        "ahead.ask(map(str, range(1000)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
