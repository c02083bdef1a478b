"""Work in threads beside the screen: loading a model, and running a request. The screen never waits for either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ling_local.engine.protocol import Engine, EngineInfo, EngineSpec
from ling_local.errors import LingError
from ling_local.generate import CancelToken, TextModel, generate
from ling_local.settings import Settings
from ling_local.tui.events import Failed, ScreenEvent
from ling_local.types import Event, Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is being opened.

    settings   those asked for, completed by the model's own defaults
    name       what it is called until it says so itself
    load_text  reads the tokenizer; ready waits for the weights and checks that they are what was asked for
    """

    engine: Engine
    spec: EngineSpec
    settings: Settings
    name: str
    load_text: Callable[[], TextModel]
    ready: Callable[[], EngineInfo]


class Job(Generic[T]):
    """Work in a thread of its own, and what came of it. on_end is called there."""

    def __init__(self, work: Callable[[], T], on_end: Callable[[], None], name: str = "job") -> None:
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._work, self._on_end = work, on_end
        self._value: list[T] = []
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_over(self) -> bool:
        """The work has ended, well or not."""
        return self._ended.is_set()

    def result(self) -> T:
        """Wait for the end; what the work gave. Raises what it raised."""
        self._ended.wait()
        if self.error is not None:
            raise self.error
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as error:
            self.error = error
        self._ended.set()
        self._on_end()


class Load(Job[TextModel]):
    """Reads a model: its text side, and then its weights."""

    def __init__(self, model: Model, on_end: Callable[[], None]) -> None:
        self.model = model
        self.info: EngineInfo | None = None
        self.text_model: TextModel | None = None
        super().__init__(self._load, on_end, "model-load")

    def _load(self) -> TextModel:
        self.text_model = self.model.load_text()
        self.info = self.model.ready()
        return self.text_model


class Pump:
    """One request, running in a thread; its events wait in a queue that never fills up."""

    def __init__(self, load: Load, request: Request, wake: Callable[[], None]) -> None:
        self.crash: BaseException | None = None
        self.error: LingError | None = None
        self._load = load
        self._request = request
        self._cancel = CancelToken()
        self._wake = wake
        self._events: SimpleQueue[Event | ScreenEvent] = SimpleQueue()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="pump", daemon=True).start()

    def cancel(self) -> None:
        """End within a step; its Finish still comes."""
        self._cancel.cancel()

    def take(self) -> tuple[list[Event | ScreenEvent], bool]:
        """What has come since the last call, and whether that was all."""
        over = self._over.is_set()  # before the queue is emptied: what is put later is taken by the next call
        events: list[Event | ScreenEvent] = []
        try:
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            return events, over

    def _run(self) -> None:
        try:
            text_model = self._load.result()
            for event in generate(self._load.model.engine, text_model, self._request, self._cancel):
                self._events.put(event)
        except LingError as error:
            self.error = error
            self._events.put(Failed(error))
        except BaseException as error:
            self.crash = error
        finally:
            self._over.set()
            self._wake()
