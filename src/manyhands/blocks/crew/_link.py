"""A launcher's connection to the store: the entry in the roster, and reconnection after a cut.

    link = CrewLink(store, signer, numbers, processes=1, serving=True, patience=600.0)
    link.ask(SharedRoster.refresh)        the roster; None while the store is lost
    link.report_end(number, left=True)    a worker is done
    link.stopped()                        numbers of workers without a heartbeat
    link.has_returned()                   whether a lost store answers again
    link.leave()

A launcher that needs the store is in the roster until it ends. The launcher that serves the store
waits for all other launchers.

An attempt to reach a lost store may take as long as the store's timeout, so a thread reconnects.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew import _store
from manyhands.blocks.crew._processes import say
from manyhands.blocks.crew._roster import Roster, number_of
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import PREFIX, Signer, StoreClient, parse_address
from manyhands.errors import StoreLost

STOPPED_LIMIT = 60.0  # seconds of silence after which a worker is killed
EXPECTED_WAIT = 2.0  # seconds to wait for the serving launcher to publish `expected`
PAUSE = 1.0  # seconds between two attempts; without a route, an attempt fails immediately
ANSWER = 5.0  # seconds within which the host of the store must answer
Answer = TypeVar("Answer")


class CrewLink:
    def __init__(
        self,
        store: str,
        signer: Signer,
        numbers: Iterable[int],
        *,
        processes: int,
        serving: bool,
        patience: float,
    ) -> None:
        self.store = store
        self.signer = signer
        self.processes = processes
        self.serving = serving
        self.patience = patience  # seconds until a lost store is given up
        self._numbers = frozenset(numbers)  # of this launcher's workers
        self.shared: SharedRoster | None = self._connect()  # None while the store is lost
        self.lost_at = -float("inf")  # time of the last loss
        self._return: ReturnToStore | None = None  # set while the store is lost
        self._cut_off: frozenset[str] = frozenset()  # processes present at the last loss

    def _connect(self, former_id: str = "") -> SharedRoster:
        client = StoreClient(self.store, 1.0, self.signer)
        try:
            shared = SharedRoster(client, HeartbeatMonitor(STOPPED_LIMIT), self.processes)
            shared.watched = self._watched
            # A new id, because other processes know the count of the former heartbeat.
            shared.id = f"host-{secrets.token_hex(4)}"
            # Start the heartbeat before the entry in the roster becomes visible.
            client.start_heartbeat(f"{PREFIX}heartbeat/{shared.id}")
            shared.change(lambda r: r.without_launcher(former_id).with_launcher(shared.id))
        except BaseException:
            client.close()
            raise
        return shared

    def _watched(self, roster: Roster) -> list[str]:
        if self.serving:
            found = {*roster.everyone, *roster.launchers}
        else:
            found = {id for id in roster.everyone if roster.worker_of(id) in self._numbers}
        return sorted(found - roster.gone)

    def agree_on_expected(self, expected: int | None) -> str:
        """Return the number of workers that the first round waits for.

        The launcher that serves the store, or has the option, publishes the number.
        """
        assert self.shared is not None
        client = self.shared.client
        key = PREFIX + "expected"
        own = str(expected or len(self._numbers))
        if self.serving or expected is not None:
            client.put(key, own)
            return own
        until = time.monotonic() + EXPECTED_WAIT
        while time.monotonic() < until:
            if published := client.read(key):
                return published
            time.sleep(0.05)
        return own

    # -- while the store answers ---------------------------------------------------------------

    def ask(self, action: Callable[[SharedRoster], Answer]) -> Answer | None:
        shared = self.shared
        if shared is None:
            return None
        try:
            return action(shared)
        except StoreLost as error:
            say(
                f"the store at {self.store} is lost: {error.why}. This command tries to reconnect "
                f"for {self.patience:g} s, and starts no worker until then."
            )
            self.shared = None
            shared.client.close()
            self.lost_at = time.monotonic()
            self._return = ReturnToStore(self.store, lambda: self._connect(shared.id))
            return None

    def report_end(self, number: int, left: bool) -> Roster | None:
        def report(shared: SharedRoster) -> Roster:
            for inner_rank in range(self.processes):
                shared.report_end(number * self.processes + inner_rank, left)
            return shared.roster

        return self.ask(report)

    def stopped(self) -> set[int]:
        roster = self.ask(SharedRoster.refresh)
        if roster is None or self.shared is None:
            return set()
        monitor = self.shared.monitor
        # After a cut, a worker resumes its heartbeat after the next round, under a new id.
        in_a_block = {id for id in self._cut_off if not monitor.has_advanced(id)}
        spared = in_a_block - monitor.silent_for(self.patience)
        numbers = set()
        for id in monitor.silent - spared - roster.gone:
            # Observed processes may have left the roster.
            if id in roster.everyone and not roster.is_replaced(id):
                numbers.add(number_of(id) // self.processes)
        return numbers

    def others_have_ended(self) -> bool:
        roster = self.ask(SharedRoster.refresh)
        if roster is None or self.shared is None:
            return False
        # A vanished host sends no report. After this silence, its store calls have timed out.
        silent = self.shared.monitor.silent_for(_store.STORE_TIMEOUT)
        ended = {*roster.gone, *silent, self.shared.id}
        return ended >= {*roster.here, *roster.launchers}

    def leave(self) -> None:
        shared = self.shared
        if self._return is not None:
            self._return.closed.set()
            shared = self._return.shared
        if shared is None:
            return
        id = shared.id
        try:
            shared.change(lambda roster: roster.without_launcher(id))
        except StoreLost as error:
            say(f"the store at {self.store} is lost: {error.why}.")
        shared.client.close()

    # -- while the store is lost ---------------------------------------------------------------

    def has_returned(self) -> bool:
        """Return whether a lost store has answered since the last call; if so, use it again."""
        if self._return is None or self._return.shared is None:
            return False
        say(f"the store at {self.store} answers again.")
        self.shared = self._return.shared
        self._return = None
        self._cut_off = frozenset(self.shared.roster.everyone)
        return True

    @property
    def given_up(self) -> str:
        """The last error if the store has been lost for more than `patience` seconds; else ""."""
        if self._return is None or time.monotonic() - self.lost_at <= self.patience:
            return ""
        return self._return.error


class ReturnToStore:
    def __init__(self, store: str, connect: Callable[[], SharedRoster]) -> None:
        self.shared: SharedRoster | None = None  # set when the store answers
        self.error = f"the store at {store} does not answer."  # of the last attempt
        self.closed = threading.Event()
        self._address = parse_address(store)
        self._connect = connect
        threading.Thread(target=self._run, name="manyhands return", daemon=True).start()

    def _run(self) -> None:
        while not self.closed.wait(PAUSE):
            try:
                # Avoid torch's connection attempts, which are long and print stack traces.
                socket.create_connection(self._address, ANSWER).close()
                self.shared = self._connect()
                return
            except OSError as error:
                host, port = self._address
                self.error = f"the store at {host}:{port} does not answer ({error})."
            except (StoreLost, ValueError) as error:  # ValueError: the store of a different run
                self.error = str(error)
