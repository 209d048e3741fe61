"""Seams: how features join the engine, which names none of them.

extension   a feature of one wrapped model; its class is named in :data:`EXTENSIONS`
form        how tensors of a library's class are made of plain ones; its class is named in
            :data:`FORMS` (:mod:`infinity.core.units.forms`)
event       something that happens in a job, with a list of the functions to call then

[Note: why lists and no hooks] The engine calls every listener of an event at one place, the same on
every rank, so a listener may meet other ranks there. An empty list costs one truth test.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from .machine.tiers import Tier

# The classes of all extensions. `infinity/__init__.py` fills it with paths below infinity/; a class
# of a script stands there itself.
EXTENSIONS: list[Any] = []
# The classes of the ways from disk to the device beside the one through the host's memory
# (:class:`infinity.core.homes.staging.ThroughHost`), best first, likewise.
STAGING_BACKENDS: list[Any] = []
# The classes of all forms, likewise.
FORMS: list[Any] = []
# The classes of what a wrap changes in a model before it reads it, in their order, likewise.
CHANGES: list[Any] = []
# The classes that recognise optimizers beside torch's (:class:`.step.rules.Recogniser`), likewise.
RULES: list[Any] = []
# The functions that know further limits of memory than :mod:`.machine.limits`, likewise: each
# returns the bytes that this process may still use, and a description.
LIMITS: list[Any] = []
# The module that reads other tools' configurations.
CONFIG_READER = "infinity.ext.migrate.reader"


@functools.cache
def is_there(module: str) -> bool:
    """Tells whether ``module`` exists: a folder of an extension or a tool may be deleted."""
    try:
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None  # else of compiled files alone
    except ModuleNotFoundError:  # of a folder around it
        return False


def classes_of(listed: Iterable[Any]) -> Iterator[Any]:
    """Yields the listed classes. Skips a path whose folder is not there, or another one that it
    builds on."""
    return filter(None, map(_load, listed))


@functools.cache
def _load(path: Any) -> Any:
    if not isinstance(path, str):
        return path
    module, _, name = f"infinity.{path}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        folder = ".".join((error.name or "").split(".")[:3])
        if folder.startswith(("infinity.ext", "infinity.tools")) and not is_there(folder):
            return None
        raise


class Term(NamedTuple):
    """Bytes of one tier that an extension will hold, with a reason."""

    tier: Tier
    what: str
    nbytes: int


class Place(Protocol):
    """The place of a tensor that is neither a parameter nor a buffer of its model."""

    tensor: Any

    def replace(self, tensor: Any) -> None:
        """Puts another tensor there."""


class FirstValues:
    """Values of one model's parameters as it is wrapped: in its memory, in files, or drawn."""

    def fill(self, writer: Any, sent: set[Any]) -> None:
        """Sends the values of parameters that are not in ``sent`` to ``writer``
        (:class:`~infinity.core.wrap.send_home.HomeWriter`), and adds those to ``sent``. Makes their
        tensors, and buffers, real. Raises ConfigError. Every rank calls this; it reads files."""

    def undo(self) -> None:
        """Restores the model, at any time. Idempotent."""


class OutsideSteps:
    """Steps the parameters of one optimizer that the engine does not move. This base has none."""

    def step(self, groups: Sequence[Any], clip: float) -> None:
        """Steps them. ``clip``: the factor of all gradients. Raises UsageError."""

    def switch(self, groups: Sequence[Any], method: str) -> None:
        """Runs a ``method`` of the class on them."""

    def load(self, state: Any, groups: Sequence[Any], params: Sequence[Any]) -> None:
        """Loads ``state``, by the numbers of ``params``, those of ``groups`` in order."""


class Change:
    """A change of one model that a wrap makes before it reads it."""

    def prepare(self, model: Any) -> None:
        """Changes what reading ``model`` would find otherwise. May not fail."""

    def make(self, model: Any, optimizers: Sequence[Any], config: Any) -> None:
        """Changes ``model`` as ``config`` says. Raises ConfigError."""

    def settle(self) -> None:
        """Lets go of what was before, once the values are at home. May not fail."""

    def undo(self) -> None:
        """Restores the model, after :meth:`make`, in the middle of it or before. Idempotent."""

    def release(self) -> None:
        """Ends what was needed only while the model was wrapped. Idempotent."""


class Events:
    """The listeners of one job. All but ``moved`` and ``closed`` run in the training thread."""

    # The homes are allocated, and have no values yet: the job. May wait for other ranks, may raise.
    allocated: list[Callable[[Any], None]]
    # An outermost use of the model begins, before recovery: its operation, if it is one. May wait
    # for the disk.
    use_begun: list[Callable[[Any], None]]
    # An exception has left something to recover from, and nothing of it is done yet. May be called
    # again.
    recovering: list[Callable[[], None]]
    # The use may run: nothing is left to recover from.
    use_ready: list[Callable[[], None]]
    # All that runs beside the training has to end: every rank waits for it here.
    finishing: list[Callable[[], None]]
    # Frozen parameters are about to be stepped: what was asked for. May raise UsageError.
    admitting: list[Callable[[str], None]]
    # Parameters without memory for a step need it: the arguments of
    # :func:`infinity.ext.class_step.admission.admit`. The first listener gives it. May wait for
    # other ranks. Raises UsageError or CapacityError.
    making_room: list[Callable[..., None]]
    # A wrapped model is given optimizers: model, what was given, configuration. Returns what
    # stands for them. May wait for other ranks. Raises ConfigError, UsageError or CapacityError.
    joining: list[Callable[[Any, Any, Any], Any]]
    # A root forward begins: module, args, kwargs. May wait for other ranks.
    pass_begun: list[Callable[[Any, tuple, dict], None]]
    # A forward of an owner of units, or of a root, computes from here on: module, and its units,
    # which are there. In the backward those that it repeats as well.
    forward_begun: list[Callable[[Any, Any], None]]
    # That forward has ended, perhaps by an exception: module.
    forward_ended: list[Callable[[Any], None]]
    # It has ended by an error of torch's, in a block or around it, perhaps told of before: the job,
    # and the error.
    forward_failed: list[Callable[..., None]]
    # A root forward has ended: module, and the tensors of its output.
    pass_ended: list[Callable[[Any, Any], None]]
    # A forward is about to save tensors: the pair of hooks that packs and unpacks them. Returns it,
    # or a pair around it.
    packing: list[Callable[[tuple[Callable, Callable]], tuple[Callable, Callable]]]
    # Gradients were averaged over the ranks: the flat param, this rank's whole gradient of it, and
    # its shard of the average, fp32.
    averaged: list[Callable[[Any, Any, Any], None]]
    # All gradients that the backward awaited of a unit have landed: the unit.
    unit_landed: list[Callable[[Any], None]]
    # A step begins, and nothing of it is planned yet. May wait for other ranks, may raise.
    step_begun: list[Callable[[], None]]
    # It is planned, and several ranks meet for it: what it is. Meets some of them, and raises on
    # all of those, or calls ``then``, if it is given, as soon as they are known to agree.
    step_compared: list[Callable[..., None]]
    # An update of a flat param by a kernel is planned: its step
    # (:class:`.step.stepper.FlatParamStep`), and the rule. May read what the update will read.
    update_planned: list[Callable[[Any, Any], None]]
    # It is submitted: its step, and the processor's ticket, if it has one. Returns the ticket that
    # readers of the new bytes wait for. Called again, for the same, after an interrupt.
    update_submitted: list[Callable[[Any, Any], Any]]
    # A step's updates are submitted: the number of steps so far, of each optimizer.
    step_ended: list[Callable[[int], None]]
    # Work has ended: lane, name, start and end in seconds of :func:`time.perf_counter`, and when
    # all was ready that it starts from.
    moved: list[Callable[..., None]]
    # The job has ended. From any thread, perhaps the garbage collector's.
    closed: list[Callable[[], None]]

    def __init__(self, **given: Any):
        vars(self).update({name: [] for name in Events.__annotations__} | given)

    def forget(self, owner: object) -> None:
        """Removes the listeners that are methods of ``owner``."""
        for listeners in vars(self).values():
            kept = [each for each in listeners if getattr(each, "__self__", None) is not owner]
            listeners[:] = kept


class Extension:
    """A feature of one wrapped model. Its methods run in the main thread, in one order on every
    rank."""

    # Whether it places what blocks save for the backward, within what the device has left.
    places_saved = False
    # Whether the model may run as plain torch beside it: neither its listeners of passes nor its
    # replaced forwards are needed where nothing moves.
    may_stand_aside = False

    @classmethod
    def check_model(cls, model: Any, config: Any, ranks: Any) -> None:
        """Raises ConfigError if ``model``, a
        :class:`~infinity.core.wrap.described_model.DescribedModel`, does not fit ``config`` or
        ``ranks``. Nothing is changed yet but by a :class:`Change`."""

    @classmethod
    def check_optimizers(cls, optimizers: Sequence[Any], config: Any) -> None:
        """Raises ConfigError if ``optimizers``, those given to a wrap or a plan, do not fit
        ``config``. Nothing is changed yet."""

    @classmethod
    def terms(cls, config: Any, units: Sequence[Any], device: Any) -> Iterable[Term]:
        """Returns the bytes that it would hold beside ``units``, given by their sizes. A plan
        counts them; the extension charges them itself."""
        return ()

    @classmethod
    def describe_model(cls, model: Any) -> None:
        """Adds what it knows to a :class:`~infinity.core.wrap.described_model.DescribedModel`, each
        time that one is made: before a wrap changes anything, and for a plan. May not fail."""

    @classmethod
    def unmoved(
        cls, model: Any, optimizers: Sequence[Any], config: Any, ranks: Any
    ) -> Iterable[Any]:
        """Returns the parameters of ``model`` that ``optimizers`` train where they are, though
        their class could be moved. Raises ConfigError; nothing is changed yet."""
        return ()

    @classmethod
    def steps_outside(cls, given: Any, books: Any, known: Any) -> OutsideSteps | None:
        """Returns what steps the parameters of the optimizer ``given`` that the engine does not
        move, as those of :meth:`unmoved`; the first extension that returns anything does it.
        ``books``: its state; ``known``: how it steps."""
        return None

    @classmethod
    def divides(cls, model: Any) -> bool:
        """Tells whether data ranks have different parts of modules of ``model``, as of experts."""
        return False

    @classmethod
    def unlisted(cls, model: Any) -> Iterable[tuple[str, Place]]:
        """Returns the names and places of the tensors that ``model`` has beside its parameters and
        buffers, and that stay with it. May not fail."""
        return ()

    @classmethod
    def describe_ranks(cls, config: Any, ranks: Any) -> Any:
        """Returns ``ranks``, completed by what it knows of them. Every rank calls this."""
        return ranks

    @classmethod
    def splits(cls, config: Any, free: Any, ways: Any) -> Iterable[Any]:
        """Yields ways to bring large weights to the device by rows, the best first, for a plan that
        is too large. ``free``: bytes of tiers without a budget; ``ways``: those of a layout. Each
        has a ``key`` of its own, ``is_sure``: whether it holds whatever the code does,
        ``rows(ways)``: weights and their rows, and ``tell(groups, config)``."""
        return ()

    @classmethod
    def first_values(cls, model: Any, config: Any) -> FirstValues | None:
        """Returns values of ``model`` that are elsewhere than in its memory. Changes nothing."""
        return None

    @classmethod
    def check_blocks(cls, config: Any, model: Any, blocks: Sequence[tuple[str, Any]]) -> None:
        """Raises ConfigError if ``blocks``, the modules that ``model`` repeats, with their names,
        cannot run as ``config`` says. Nothing is changed yet."""

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> Extension | None:
        """Returns the extension if a wrap with ``config`` needs it. May add listeners, and wait for
        other ranks. Raises ConfigError; nothing is changed yet."""
        return None

    def replace_forwards(
        self,
        job: Any,
        model: Any,
        find: Callable[[], Any],
        blocks: Sequence[tuple[str, Any, list[Any]]],
    ) -> list[Any]:
        """Replaces forwards of ``model``, a
        :class:`~infinity.core.wrap.described_model.DescribedModel`, as of the modules that it
        repeats, ``blocks``: their names, modules, and units that are gathered whole. Returns what
        removes them. ``find``: finds the context of forwards. May not fail."""
        return []

    def install(self, job: Any, model: Any) -> None:
        """Joins a job whose ``model`` is hooked: the last step of a wrap, or a later call of the
        user's (``model`` is None then). May allocate (``job.kept.keep``): an error undoes the
        wrap."""

    def rights(self, job: Any) -> dict[Any, Callable[[], bool]]:
        """Returns its states (:mod:`.run.operations`), and what tells whether the job is in
        each."""
        return {}

    def drop(self, job: Any) -> None:
        """Forgets what it knows of a pass that an exception has ended. Nothing runs any more, and
        the homes are as before the pass. May be called again; may not fail, nor meet ranks."""

    # --- with arrays that it keeps (:mod:`infinity.core.units.kept`) ---

    def describe(self) -> Any:
        """Returns plain data that a checkpoint holds with the arrays: what ``json`` takes. False,
        0 or None: nothing is there to save yet. Every rank calls this; it may block."""
        return True

    def expect(self, told: Any) -> dict[str, Any] | None:
        """Reads what :meth:`describe` told, before a load. Returns the flat params of which the
        checkpoint has arrays, by their names; None: all. Raises UsageError if the arrays are not
        those of this job, ValueError for what no save writes; changes nothing."""
        return None

    def resume(self, told: Any | None) -> None:
        """Takes what :meth:`describe` told, in a load. The arrays are read afterwards. None: the
        checkpoint has none of it, and the arrays are zero now."""


def kinds() -> Iterator[type[Extension]]:
    """Yields the classes of all extensions."""
    return classes_of(EXTENSIONS)


def begin_extensions(config: Any, device: Any, collectives: Any, events: Events) -> list[Extension]:
    """Begins the extensions that a wrap needs. Skips those whose folder is not there."""
    begun = (kind.begin(config, device, collectives, events) for kind in kinds())
    return [*filter(None, begun)]
