"""The prompt: keys, history, completion, editor, paste. It returns a text, or says that the person leaves.

Enter sends; Alt-Enter and Ctrl-J make a new line, and so does Enter inside a block of three quotes. A paste is one
insertion, whatever it holds. Ctrl-C clears the line; on an empty one `read` raises KeyboardInterrupt, and Ctrl-D
there raises EOFError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application.current import get_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, has_focus, is_searching
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import TabsProcessor, Transformation, TransformationInput
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from ling_local.tui.commands import ALIASES, COMMANDS, block_is_open
from ling_local.tui.wrap import TAB, fold

Words = Callable[[], Iterable[str]]

_MENU_ROWS = 6
_STYLE = {
    "prompt": "bold ansicyan",
    "bottom-toolbar": "noreverse ansibrightblack",
    "bottom-toolbar.text": "noreverse",
    "completion-menu": "noinherit",
    "completion-menu.completion": "noinherit",
    "completion-menu.completion.current": "noinherit bold ansicyan reverse",
    "completion-menu.meta.completion": "noinherit ansibrightblack",
    "completion-menu.meta.completion.current": "noinherit ansibrightblack",
}


class Screen(Vt100_Output):
    """A terminal that is not asked where its cursor is.

    Not every terminal answers, the answer may come when somebody else reads, and what it is wanted for (how much
    room there is below) does not matter to a prompt that scrolls.
    """

    def get_rows_below_cursor_position(self) -> int:
        return 1


def open_screen(stdout: TextIO) -> Output:
    """The terminal behind stdout."""
    return Screen.from_pty(stdout)


class Tabs(TabsProcessor):
    """Tabs as blanks for the eye; a line without any costs nothing, however long it is."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        if "\t" not in transformation_input.document.lines[transformation_input.lineno]:
            return Transformation(transformation_input.fragments)
        return super().apply_transformation(transformation_input)


class CommandCompleter(Completer):
    """Names of slash commands, then what their argument may be. words: for commands whose words change."""

    def __init__(self, words: Mapping[str, Words] | None = None) -> None:
        self._words = dict(words or {})
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text or text.startswith("//"):
            return
        head, blank, argument = text.partition(" ")
        name = head[1:].lower()
        if not blank:
            for command in COMMANDS.values():
                if command.name.startswith(name):
                    yield Completion(command.name, -len(name), display=f"/{command.name}", display_meta=command.help)
            return
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return
        if name in ("read", "save"):
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif " " not in argument:
            known = self._words[name]() if name in self._words else COMMANDS[name].words
            for word in known:
                if word.lower().startswith(argument.lower()):
                    yield Completion(word, -len(argument))
            if name == "load":
                yield from self._paths.get_completions(Document(argument), complete_event)


class Prompt:
    """Reads what the person wants to say."""

    def __init__(
        self,
        source: Input,
        target: Output,
        history: History,
        *,
        toolbar: Callable[[], str],
        failed: Callable[[], BaseException | None] = lambda: None,
        words: Mapping[str, Words] | None = None,
        colour: bool = True,
        mark: str = "› ",
    ) -> None:
        self.was_cleared = False  # by Ctrl-C, since `read` began: what stood there to begin with is not meant any more
        self._failed, self._mark = failed, mark
        self._session: PromptSession[str] = PromptSession(
            message=[("class:prompt", mark)],
            input=source,
            output=target,
            history=history,
            multiline=True,
            prompt_continuation=" " * len(mark),
            completer=CommandCompleter(words),
            complete_while_typing=Condition(_types_a_command),
            complete_style=CompleteStyle.COLUMN,
            bottom_toolbar=lambda: _toolbar(toolbar()),
            key_bindings=_bindings(self._clear, self._stands),
            input_processors=[Tabs(TAB, " ", " ")],
            style=Style.from_dict(_STYLE),
            include_default_pygments_style=False,
            color_depth=None if colour else ColorDepth.DEPTH_1_BIT,
            enable_suspend=True,
            search_ignore_case=True,
            tempfile_suffix=".md",
            mouse_support=False,
        )

    @property
    def was_erased(self) -> bool:
        """The text that was read last is not on the screen any more: it is higher than that."""
        return self._session.app.erase_when_done

    def read(self, default: str = "", editor: bool = False) -> str:
        """The next text, whole. default stands in the line to begin with; editor: it is opened there at once.

        Raises what `failed` gives, at once or when `refresh` is next called.
        """

        def begin() -> None:
            if not self._end_if_failed() and editor:
                get_app().current_buffer.open_in_editor()

        self.was_cleared = self._session.app.erase_when_done = False
        rows = self._session.output.get_size().rows
        self._session.reserve_space_for_menu = max(min(_MENU_ROWS, rows - 2), 0)  # a low window has to show the line
        return self._session.prompt(default=default, pre_run=begin)

    def refresh(self) -> None:
        """Draw the toolbar anew, and end a `read` that `failed`. From any thread, at any time."""
        loop = self._session.app.loop
        if loop is not None:
            with suppress(RuntimeError):  # closed: the read has just ended
                # `invalidate` looks for the loop several times: in the thread that reads it cannot lose it halfway
                loop.call_soon_threadsafe(self._look)

    def _clear(self, buffer: Buffer) -> None:
        buffer.reset()
        self.was_cleared = True

    def _stands(self, text: str) -> None:
        """This is what will be returned. The screen can show the end of it alone where it is higher: then it goes."""
        size = self._session.output.get_size()
        shown = text.replace("\n", " \n") + " "  # after each line there is a place for the cursor
        height = len(fold(shown, size.columns - len(self._mark)))
        self._session.app.erase_when_done = height >= size.rows

    def _look(self) -> None:
        if not self._end_if_failed():
            self._session.app.invalidate()

    def _end_if_failed(self) -> bool:
        app, error = self._session.app, self._failed()
        if error is not None and app.is_running and not app.is_done:
            app.exit(exception=error)
        return error is not None


def _types_a_command() -> bool:
    """Completions pop up by themselves for commands only, never for text or a paste."""
    return get_app().current_buffer.text.startswith("/") and "\n" not in get_app().current_buffer.text


def _toolbar(text: str) -> StyleAndTextTuples:
    return [("class:bottom-toolbar.text", text)]


def _bindings(clear: Callable[[Buffer], None], stands: Callable[[str], None]) -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus("DEFAULT_BUFFER") & ~is_searching

    @bindings.add(Keys.ControlM, filter=typing)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        buffer.complete_state = None  # what the menu has put into the line is taken
        if block_is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            stands(buffer.text)
            buffer.validate_and_handle()

    @bindings.add(Keys.ControlJ, filter=typing)
    @bindings.add(Keys.Escape, Keys.ControlM, filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add(Keys.ControlC, filter=typing)
    @bindings.add("<sigint>", filter=typing)
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            clear(event.current_buffer)
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @bindings.add(Keys.ControlG, filter=typing)
    def _editor(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return bindings
