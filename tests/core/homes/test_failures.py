"""When the disk fails: a typed error at once, never a wrong number, never a hang, nothing left
behind.

Words used here: **home**, **child** as in `models.py`. **fault**: what INFINITY_FAULTS makes the
I/O engine meet, by seed; ``first_piece`` leaves the transfers before it alone. **lasting**: every
transfer from then on fails. **passing**: some do. **completed**: a step whose forward, backward,
step() and zero_grad() raised nothing. **right**: the bits of a run without faults.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from deleted import needs
from inside import parts_of
from models import (
    at_home,
    differing,
    environment,
    in_child,
    leftovers,
    loss_of,
    start_child,
    swap_files,
    tokens,
    transformer,
    with_least,
)
from runs import adamw

import infinity
from infinity import native
from infinity.core.homes.store import Guard
from infinity.core.plan import memory_terms, plan
from infinity.core.plan.memory_plan import LADDER
from infinity.core.run import resources

SEED = 50
LR = 1e-2
STEPS = 6
SAVED_AT = 1
TYPED = (infinity.StorageError, infinity.CorruptionError)

pytestmark = pytest.mark.timeout(120)  # a hang is a failure, too


def build(homes: tuple[str, str], folder: Path, **more: Any) -> tuple[Any, Any]:
    model = transformer(SEED, blocks=4)
    optimizer = adamw(model, LR)
    config = at_home(*homes, folder, **{"param_dtype": "bf16", **more})
    return infinity.wrap_model(
        model, optimizer, with_least(model, optimizer, config) if "nvme" in homes else config
    )


def one_step(model: Any, optimizer: Any, at: int) -> float:
    torch.manual_seed(at)
    loss = loss_of(model, tokens(SEED + at))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    for index, entry in optimizer.state_dict()["state"].items():
        state |= {f"{index} {name}": torch.as_tensor(value) for name, value in entry.items()}
    return state


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> dict[str, Any]:
    """Losses and states of a run without faults, and a checkpoint of its first step."""
    torch.set_num_threads(1)
    model, optimizer = build(("host", "host"), tmp_path_factory.mktemp("none"))
    losses, states = [], [state_of(model, optimizer)]
    path = tmp_path_factory.mktemp("checkpoint") / "saved"
    for at in range(STEPS):
        losses.append(one_step(model, optimizer, at))
        states.append(state_of(model, optimizer))
        if at + 1 == SAVED_AT:
            infinity.save_checkpoint(path, model, optimizer, {"step": SAVED_AT})
    return {"losses": losses, "states": states, "path": path}


def check_state(model: Any, optimizer: Any, right: dict[str, Any], completed: int) -> None:
    """The state after so many completed steps is right, or cannot be had: a half-applied step must
    not get out."""
    try:
        state = state_of(model, optimizer)
    except infinity.InfinityError:
        return
    assert differing(state, right["states"][completed]) == [], (
        f"the state after {completed} completed steps is wrong"
    )


def check_resumes(right: dict[str, Any], swap: Path) -> None:
    """The last checkpoint loads into a fresh wrap and goes on with the right bits."""
    model, optimizer = build(("nvme", "nvme"), swap)
    first = infinity.load_checkpoint(right["path"], model, optimizer)["step"]
    assert [one_step(model, optimizer, at) for at in range(first, STEPS)] == right["losses"][first:]
    assert differing(state_of(model, optimizer), right["states"][STEPS]) == []


def pieces_of_a_step(homes: tuple[str, str], folder: Path) -> tuple[int, int]:
    """Roughly how many transfers a wrap takes, and a step: faults that always hit show it."""

    def reached(first: int) -> int:
        with environment(INFINITY_FAULTS=f"seed=1,eio=1.0,first_piece={first}"):
            try:
                model, optimizer = build(homes, folder)
            except TYPED:
                return -1
            for at in range(STEPS):
                try:
                    one_step(model, optimizer, at)
                except TYPED:
                    return at
        return STEPS

    wrap = next(first for first in range(0, 4000, 40) if reached(first) >= 0)
    step = next(more for more in range(10, 4000, 20) if reached(wrap + more) >= 1)
    return wrap, step


HOMES = [("nvme", "nvme"), ("nvme", "host"), ("host", "nvme")]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> dict[tuple[str, str], tuple[int, int]]:
    class Pieces(dict):
        """Found for the homes that a test asks for."""

        def __missing__(self, homes: tuple[str, str]) -> tuple[int, int]:
            self[homes] = pieces_of_a_step(homes, tmp_path_factory.mktemp("pieces"))
            return self[homes]

    return Pieces()


@pytest.mark.parametrize("fault", ["eio", "bit_flip", "lost_write"])
@pytest.mark.parametrize(
    "where",
    [0.1, 0.7, *(pytest.param(where, marks=pytest.mark.slow) for where in (0.4, 1.2, 2.3))],
    ids=lambda where: f"{where} steps in",
)
@pytest.mark.parametrize("homes", HOMES, ids="-".join)
def test_a_lasting_fault_ends_in_a_typed_error(fault, where, homes, pieces, right, swap):
    """Method: from a moment in the middle of training on, every transfer fails, flips a bit, or
    (writes) is lost; what completed before is right, then forward, backward or step() raises a
    typed error, every further step raises too, and the last checkpoint goes on in a fresh wrap with
    the right bits."""
    wrap, step = pieces[homes]
    with environment(
        INFINITY_FAULTS=f"seed={SEED},{fault}=1.0,first_piece={wrap + int(where * step)}"
    ):
        model, optimizer = build(homes, swap)
        losses: list[float] = []
        with pytest.raises(TYPED) as raised:
            for at in range(40):
                losses.append(one_step(model, optimizer, at % STEPS))
        assert losses == right["losses"][: len(losses)], "wrong numbers before the error"
        if fault == "eio":
            assert (
                isinstance(raised.value, infinity.StorageError) and raised.value.errno == errno.EIO
            )
            assert str(swap) in str(raised.value.filename), raised.value.filename
        else:
            assert isinstance(raised.value, infinity.CorruptionError)
        for _ in range(3):
            with pytest.raises(infinity.InfinityError):
                one_step(model, optimizer, len(losses))
            check_state(model, optimizer, right, len(losses))
        del raised, model, optimizer
        assert leftovers(swap) == []
    check_resumes(right, swap)


@pytest.fixture(params=[0, 1, 3], ids=["in memory", "1 block", "3 blocks"])
def blocks(request, monkeypatch) -> int:
    """Puts the checksums in memory, or on the disk, of which so many blocks are in memory at a
    time."""
    if request.param:
        monkeypatch.setattr(plan, "LADDER", LADDER[-1:])
        monkeypatch.setattr(memory_terms, "SUMS_NBYTES", 0)
        monkeypatch.setattr(resources, "SUMS_NBYTES", request.param * native.BLOCK_NBYTES)
    return request.param


def test_the_same_run_without_faults_is_right(blocks, right, swap):
    """Method: the twin; the loop of the tests above completes without an error, and with the right
    bits."""
    model, optimizer = build(("nvme", "nvme"), swap)
    assert (parts_of(model).store.space.sums is not None) == bool(blocks)
    assert [one_step(model, optimizer, at) for at in range(STEPS)] == right["losses"]
    assert differing(state_of(model, optimizer), right["states"][STEPS]) == []


@pytest.mark.parametrize(
    "fault",
    ["lost_write", "torn_write", "bit_flip", "eio", "hang", "short_transfer", "delay", "reorder"],
)
@pytest.mark.parametrize("blocks", [1, 3], indirect=True)
def test_passing_faults_are_harmless_or_found_with_checksums_on_the_disk(
    fault, blocks, right, swap
):
    """Method: some transfers, of data or of their checksums, are lost, torn, flipped, refused or
    never answered: what completed is right, then a typed error comes. Short, late and reordered
    ones change nothing."""
    is_harmless = fault in ("short_transfer", "delay", "reorder")
    losses: list[float] = []
    with environment(
        INFINITY_FAULTS=f"seed={SEED},{fault}={0.3 if is_harmless else 0.01},first_piece=300",
        INFINITY_IO_TIMEOUT="120" if is_harmless else "0.5",
    ):
        with pytest.raises(TYPED) if not is_harmless else contextlib.nullcontext():
            model, optimizer = build(("nvme", "nvme"), swap)
            for at in range(STEPS if is_harmless else 100 * STEPS):
                losses.append(one_step(model, optimizer, at))
        assert losses[:STEPS] == right["losses"][: len(losses)]
        if is_harmless:
            assert differing(state_of(model, optimizer), right["states"][STEPS]) == []


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("fault", ["eio=1.0", "bit_flip=1.0"])
def test_both_engines_report_faults(engine, fault, pieces, right, swap):
    """Method: lasting faults under each I/O engine."""
    if engine == "uring" and native.uring_refusal():
        pytest.skip(native.uring_refusal())
    wrap, step = pieces[HOMES[0]]
    with environment(
        INFINITY_FAULTS=f"seed=2,{fault},first_piece={wrap + step}", INFINITY_IO=engine
    ):
        model, optimizer = build(HOMES[0], swap)
        with pytest.raises(TYPED):
            for at in range(STEPS):
                assert one_step(model, optimizer, at) == right["losses"][at]


@pytest.mark.parametrize(
    "call",
    ["save_checkpoint", "save_pretrained", "state_dict", "unwrap_model", "full_params", "eval"],
)
def test_a_fault_outside_the_loop_is_typed(call, pieces, right, swap, tmp_path):
    """Method: the disk fails after two steps; saving, reading and unwrapping raise a typed error;
    nothing half-written stays in place, and the model can be dropped."""
    wrap, step = pieces[HOMES[0]]
    with environment(INFINITY_FAULTS=f"seed=2,eio=1.0,first_piece={wrap + 2 * step}"):
        model, optimizer = build(HOMES[0], swap)
        with pytest.raises(TYPED):
            for at in range(STEPS):
                one_step(model, optimizer, at)
        with pytest.raises(infinity.InfinityError):
            if call == "save_checkpoint":
                infinity.save_checkpoint(tmp_path / "new", model, optimizer)
            elif call == "save_pretrained":
                infinity.save_pretrained(model, tmp_path / "new")
            elif call == "state_dict":
                model.state_dict()
            elif call == "unwrap_model":
                infinity.unwrap_model(model, optimizer)
            elif call == "full_params":
                with infinity.full_params(model):
                    pass
            else:
                with torch.no_grad():
                    model.eval()(tokens(0))
        assert not (tmp_path / "new" / "manifest.json").exists()
        assert not list(tmp_path.glob("new/model*.safetensors"))
        if call == "full_params":
            with pytest.raises(infinity.InfinityError):
                model.norm.weight.sum()
        del model, optimizer
    assert leftovers(swap) == []


# --------------------------------------------------------------------------------------------------
# The disk itself
# --------------------------------------------------------------------------------------------------


def test_swap_files_are_private_reserved_and_without_a_name(right, swap):
    """Method: look at what a running job has on disk: files of mode 0600 that no folder names,
    every byte reserved."""
    model, optimizer = build(HOMES[0], swap)
    one_step(model, optimizer, 0)
    files = swap_files(swap)
    assert files and os.listdir(swap) == []
    for file in files:
        info = file.stat()
        assert (
            stat.S_IMODE(info.st_mode) == 0o600
            and info.st_uid == os.getuid()
            and info.st_nlink == 0
        )
        assert info.st_blocks * 512 >= info.st_size, (
            f"{file}: {info.st_blocks * 512} of {info.st_size} bytes are reserved"
        )
    assert (
        sum(file.stat().st_size for file in files)
        >= infinity.stats(model).tiers["nvme"].planned_nbytes
    )


@pytest.mark.parametrize("harm", ["flip", "zero", "truncate", "old bytes"])
def test_bytes_changed_on_disk_are_found(harm, blocks, right, swap):
    """Method: change the swap file behind the engine's back: a flipped bit in every block, zeros,
    an end cut off, the bytes of an earlier step (with its checksums, if they are on disk); a typed
    error, or right numbers where nothing that is read was hit."""
    model, optimizer = build(HOMES[0], swap)
    one_step(model, optimizer, 0)
    model.state_dict()  # waits until all is at home
    (file,) = swap_files(swap)
    early = file.read_bytes()
    one_step(model, optimizer, 1)
    model.state_dict()
    with open(file, "r+b") as opened:
        if harm == "flip":
            for at in range(100, file.stat().st_size, 4096):
                opened.seek(at)
                byte = opened.read(1)[0]
                opened.seek(at)
                opened.write(bytes([byte ^ 16]))
        elif harm == "zero":
            opened.write(b"\0" * file.stat().st_size)
        elif harm == "truncate":
            opened.truncate(4096)
        else:
            opened.write(early)
    with pytest.raises(TYPED):
        for at in range(2, STEPS):
            assert one_step(model, optimizer, at) == right["losses"][at]
    with pytest.raises(infinity.InfinityError):
        one_step(model, optimizer, 2)
    del model, optimizer
    assert leftovers(swap) == []


def test_a_removed_swap_folder_does_not_hurt(right, swap):
    """Method: someone deletes the job's folder while it trains; the descriptors are open, so it
    trains on."""
    import shutil

    model, optimizer = build(HOMES[0], swap)
    losses = [one_step(model, optimizer, 0)]
    for folder in swap.iterdir():
        shutil.rmtree(folder)
    losses += [one_step(model, optimizer, at) for at in range(1, 4)]
    assert losses == right["losses"][:4]
    del model, optimizer
    assert leftovers(swap) == []


def test_a_real_full_disk_is_met_at_the_wrap(swap):
    """Method: a tmpfs of 1 MiB as the folder, where one can be mounted; CapacityError at the wrap
    with the numbers, the model untouched, and nothing left there."""
    if os.system(f"mount -t tmpfs -o size=1m none {swap} 2>/dev/null") != 0:
        pytest.skip("needs the right to mount")
    try:
        model = transformer(SEED, blocks=4)
        optimizer = adamw(model, LR)
        with pytest.raises(infinity.CapacityError, match=re.escape(str(swap))):
            infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap))
        assert leftovers(swap) == []
        assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    finally:
        os.system(f"umount -l {swap}")


def test_a_file_system_without_direct_io_gives_the_same_bits(right, swap):
    """Method: train on a tmpfs, which may refuse O_DIRECT; the right bits."""
    if os.system(f"mount -t tmpfs -o size=64m none {swap} 2>/dev/null") != 0:
        pytest.skip("needs the right to mount")
    try:
        model, optimizer = build(HOMES[0], swap)
        assert [one_step(model, optimizer, at) for at in range(3)] == right["losses"][:3]
        del model, optimizer
        assert leftovers(swap) == []
    finally:
        os.system(f"umount -l {swap}")


# --------------------------------------------------------------------------------------------------
# How a job ends
# --------------------------------------------------------------------------------------------------

# One process forks a child for every end; the child runs its lines at the top of the main module
# and then ends as any interpreter does.
SCRIPT = """
import gc, os, signal, sys, threading, time
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
import infinity
from models import at_home, loss_of, swap_files, tokens, transformer, with_least
from runs import adamw
from pathlib import Path

first = transformer(1, blocks=1)  # what torch imports when it is first used
infinity.unwrap_model(*infinity.wrap_model(first, adamw(first, 1e-2), at_home("host", "host", Path("."), device="cpu")))
gc.collect()
gc.freeze()  # else each child's end goes through all that is imported, several times
for name, lines in {ends!r}.items():
    child = os.fork()
    if not child:
        swap = Path({folder!r}, name, "swap")
        swap.mkdir(parents=True)
        os.dup2(os.open(swap.parent / "stderr", os.O_WRONLY | os.O_CREAT), 2)
        signal.alarm(60)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path({folder!r}, name, "status").write_text(str(status))
else:
    os._exit(0)

model = transformer(1, blocks=3)
optimizer = adamw(model, 1e-2)
config = at_home("nvme", "nvme", swap, device="cpu")
model, optimizer = infinity.wrap_model(model, optimizer, with_least(model, optimizer, config))
loss = loss_of(model, tokens(1))
assert swap_files(swap) and os.listdir(swap) == []
exec(compile(lines, "script", "exec"))
"""  # noqa: E501

ENDS = {
    "returns": ("loss.backward(); optimizer.step()", 0, ""),
    "returns with a graph": ("pass", 0, ""),
    "returns in a function": (
        "def run(model):\n    loss_of(model, tokens(2)).backward()\nrun(model)",
        0,
        "",
    ),
    "sys.exit": ("loss.backward(); optimizer.step(); sys.exit(3)", 3, ""),
    "exception": (
        "loss.backward(); optimizer.step(); raise ValueError('mine')",
        1,
        "ValueError: mine",
    ),
    "exception in a hook": (
        (
            "model.blocks[1].norm1.weight.register_hook(lambda g: 1 / 0); loss_of(model,"
            " tokens(2)).backward()"
        ),
        1,
        "ZeroDivisionError",
    ),
    "exception in forward": ("model('nonsense')", 1, "TypeError"),
    "interrupt": (
        # A job that was started in the background ignores the signal, and its children with it.
        (
            "signal.signal(signal.SIGINT, signal.default_int_handler); loss.backward();"
            " optimizer.step(); os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"
        ),
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "cycle": (
        "model.me = [model]; optimizer.model = model; loss.backward(); optimizer.step()",
        0,
        "",
    ),
    "other thread": (
        (
            "t = threading.Thread(target=lambda: loss.backward()); t.start(); t.join();"
            " optimizer.step()"
        ),
        0,
        "",
    ),
    "two jobs": (
        (
            "other = transformer(2, blocks=3); o = adamw(other, 1e-2); other, o ="
            " infinity.wrap_model(other, o, config); loss_of(other, tokens(1)).backward();"
            " o.step(); loss.backward(); optimizer.step()"
        ),
        0,
        "",
    ),
    "inside full_params": ("block = infinity.full_params(model); block.__enter__()", 0, ""),
    "inside a forward": (
        "model.norm.register_forward_hook(lambda *a: sys.exit(4)); model(tokens(1))",
        4,
        "",
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A folder with exit status, stderr and swap folder of a script with each of the ends."""
    paths = [
        str(Path(infinity.__file__).parents[1]),
        *map(str, Path(__file__).parents[2].glob("support/*/")),
    ]
    folder = tmp_path_factory.mktemp("ends")
    ends = {name: lines for name, (lines, _, _) in ENDS.items()}
    script = SCRIPT.format(paths=paths, folder=str(folder), ends=ends)
    done = prepared.run("-c", script)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("end", ENDS)
def test_swap_files_are_gone_however_a_script_ends(end, ended):
    """Method: scripts that return, exit, raise (in the script, a forward, a hook), are interrupted,
    or end with work under way; exit status and message are the script's own, nothing else is on
    stderr, and nothing on disk.
    """
    _, status, message = ENDS[end]
    stderr = (ended / end / "stderr").read_text()
    assert leftovers(ended / end / "swap") == [], stderr
    assert int((ended / end / "status").read_text()) == status, stderr
    assert message in stderr
    if not message:
        assert stderr == ""
    assert "Exception ignored" not in stderr and "terminate called" not in stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_killed_job_leaves_nothing_and_its_space_is_free(number, swap):
    """Method: kill a child in the middle of training. It had bytes on the disk, no name for them in
    the folder, and nothing of them is left; what looks like a job's folder but is the user's stays
    through it and through the next wrap.
    """
    (swap / "mine.txt").write_text("mine")
    (swap / ".infinity-notes").write_text("a file of the user's")
    theirs = [
        swap / ".infinity-experiments" / "run.csv",
        swap / f".infinity-{os.getpid()}-0123abcd" / "swap",
    ]
    for path in theirs:
        path.parent.mkdir()
        path.write_text("results")
    (swap / ".infinity-link").symlink_to(theirs[0].parent)
    names = sorted(os.listdir(swap))

    def train():
        model, optimizer = build(HOMES[0], swap)
        for at in range(10_000):
            one_step(model, optimizer, at % STEPS)

    def has_space(child: int) -> bool:
        blocks = 0
        for path in swap_files(swap, child):
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                blocks += path.stat().st_blocks
        return blocks > 0

    child, reader = start_child(train)
    try:
        deadline = time.monotonic() + 60
        while not has_space(child):  # a file is made, then its space is reserved
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert sorted(os.listdir(swap)) == names
        time.sleep(0.3)
    finally:
        os.kill(child, number)
        os.waitpid(child, 0)
        os.close(reader)
    assert sorted(os.listdir(swap)) == names
    model, optimizer = build(HOMES[0], swap)
    one_step(model, optimizer, 0)
    del model, optimizer
    assert leftovers(swap) == names and all(path.read_text() == "results" for path in theirs)


def test_a_lock_on_the_folder_stops_nobody(swap):
    """Method: somebody holds an exclusive flock of the folder, as backup tools do; the wrap does
    not ask."""
    holder = os.open(swap, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        one_step(*build(HOMES[0], swap), 0)
    finally:
        os.close(holder)


@needs("ext/migrate")
def test_relative_folders_are_those_of_where_they_were_given(tmp_path, monkeypatch):
    """Method: a relative folder and a relative trace; the process changes its own folder before the
    wrap, and again after it."""
    (tmp_path / "here" / "swap").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = infinity.Config(params="nvme", optimizer="nvme", nvme_paths="swap", trace="trace.json")
    assert config.nvme_paths == (str(tmp_path / "here" / "swap"),)
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = transformer(SEED, blocks=1)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), config)
    assert len(swap_files(tmp_path / "here" / "swap")) == 1
    monkeypatch.chdir(tmp_path)
    one_step(model, optimizer, 0)
    infinity.unwrap_model(model, optimizer)
    assert leftovers(tmp_path / "here" / "swap") == [] and leftovers(tmp_path / "elsewhere") == []
    assert (tmp_path / "here" / "trace.json").exists()


def test_two_jobs_on_one_folder_do_not_disturb_each_other(right, swap):
    """Method: two children train on the same folder at the same time, again and again; both have
    the right losses."""

    def train():
        for _ in range(3):
            model, optimizer = build(HOMES[0], swap)
            assert [one_step(model, optimizer, at) for at in range(4)] == right["losses"][:4]
            del model, optimizer
        return "right"

    children = [start_child(train) for _ in range(2)]
    for child, reader in children:
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        assert b"right" in answer, answer
    assert leftovers(swap) == []


def test_a_wrap_that_dies_half_way_leaves_nothing(swap):
    """Method: kill a child while it wraps, at several moments; nothing is left, and the next wrap
    works."""
    for delay in (0.0, 0.005, 0.01, 0.02, 0.03):
        child, reader = start_child(lambda: [build(HOMES[0], swap) for _ in range(100)])
        time.sleep(0.05 + delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    in_child(lambda: one_step(*build(HOMES[0], swap), 0), seconds=30)
    model, optimizer = build(HOMES[0], swap)
    one_step(model, optimizer, 0)
    del model, optimizer
    assert leftovers(swap) == []


@pytest.mark.parametrize("text", ["eio", "eio=", "eio=yes", "nonsense=1", "eio=1,,seed=2"])
def test_nonsense_in_the_environment_is_a_typed_error(text, swap):
    """Method: wrong INFINITY_FAULTS; an InfinityError names the variable, and the model is
    untouched."""
    model = transformer(SEED, blocks=1)
    with (
        environment(INFINITY_FAULTS=text),
        pytest.raises(infinity.InfinityError, match="INFINITY_FAULTS"),
    ):
        infinity.wrap_model(model, adamw(model, LR), at_home("nvme", "nvme", swap))
    assert leftovers(swap) == []


@pytest.mark.parametrize(("variable", "value"), [("INFINITY_IO", "tape"), ("INFINITY_SIMD", "mmx")])
def test_unknown_engines_are_a_typed_error(variable, value, swap):
    """Method: wrong INFINITY_IO and INFINITY_SIMD; an InfinityError names variable and value."""
    model = transformer(SEED, blocks=1)
    with (
        environment(**{variable: value}),
        pytest.raises(infinity.InfinityError, match=f"{variable}.*{value}"),
    ):
        model, optimizer = infinity.wrap_model(
            model, adamw(model, LR), at_home("nvme", "nvme", swap)
        )
        one_step(model, optimizer, 0)
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    assert leftovers(swap) == []


@pytest.mark.parametrize(
    "kind, said",
    [
        (infinity.StorageError, (5, "Input/output error", "/swap")),
        (infinity.CorruptionError, ("other bytes",)),
    ],
)
def test_a_failure_is_told_once_and_raised_anew_at_every_later_block(kind, said):
    """Method: blocks inside each other. Twin: another error is none of the disk's."""
    told: list[BaseException] = []
    guard, error = Guard(told.append), kind(*said)
    with pytest.raises(ValueError), guard, guard:
        raise ValueError
    assert guard.failure is None
    with pytest.raises(kind), guard, guard:
        raise error
    assert told == [error]
    for _ in "ab":
        with pytest.raises(kind) as raised, guard:
            pytest.fail("the block ran")
        assert raised.value is not error and str(raised.value) == str(error)
