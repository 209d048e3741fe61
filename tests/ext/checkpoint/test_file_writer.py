"""Files written past the page cache while they are made, their checksums joined from those of
blocks; and the check of a checkpoint's files.

Words used here:

**slots**: the staging memory that the files of one save take in turn.
**entry**: a file's bytes and CRC-32C, as a manifest has them.
"""

from __future__ import annotations

import errno
from types import SimpleNamespace

import doubles
import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity import native
from infinity.ext.checkpoint import manifest
from infinity.ext.checkpoint.file_writer import SLOT_NBYTES, make_slots, start_file
from infinity.ext.checkpoint.home_values import HomeValues
from infinity.ext.checkpoint.manifest import check_files

MIB = 1024 * 1024


def some_tensors(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of all widths, one empty, one without dimensions, one not contiguous, and one of
    ``nbytes``."""
    torch.manual_seed(nbytes)
    return {
        "large": torch.randint(0, 256, (nbytes,), dtype=torch.uint8),
        "double": torch.randn(3, dtype=torch.float64),
        "half": torch.randn(5, 7).to(torch.bfloat16),
        "transposed": torch.randn(4, 6).t(),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(2.5),
        "small": torch.arange(-3, 3, dtype=torch.int16),
    }


def written(path, tensors, slots=None):
    slots = slots or make_slots(sum(tensor.nbytes for tensor in tensors.values()))
    with start_file(path, tensors, slots, metadata={"format": "pt"}) as file:
        return file.finish()


@pytest.mark.parametrize(
    "nbytes",
    [1, 2, 4095, 65536, 65536 + 4098, SLOT_NBYTES - 702, SLOT_NBYTES, 3 * SLOT_NBYTES + 12345],
)
def test_a_file_has_its_tensors_and_the_checksum_of_its_bytes(nbytes, tmp_path):
    """Method: files that end around the ends of blocks and slots are read by the library, and
    summed as a whole. The twin: one bit of another."""
    tensors, path = some_tensors(nbytes), tmp_path / "unit-00000.safetensors"
    entry = written(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype
        for name in tensors
    )
    raw = bytearray(path.read_bytes())
    assert (
        len(raw) % native.BLOCK_NBYTES == 0 or sum(tensor.nbytes for tensor in tensors.values()) % 8
    )  # else it had to be cut
    assert entry == {
        "nbytes": len(raw),
        "crc32c": native.crc32c(torch.frombuffer(raw, dtype=torch.uint8)),
    }
    raw[len(raw) // 2] ^= 1
    assert entry["crc32c"] != native.crc32c(torch.frombuffer(raw, dtype=torch.uint8))


@pytest.mark.parametrize("first", [0, 1, 64, 4096, 65536 - 4096, SLOT_NBYTES + 5])
@pytest.mark.parametrize("nbytes", [4096, 65536, 65536 + 4096, SLOT_NBYTES, 2 * SLOT_NBYTES + 8192])
def test_what_stays_is_written_from_where_it_is(first, nbytes, tmp_path, monkeypatch):
    """Method: beside a tensor of ``first`` bytes, two of whole blocks, at the beginnings of pages;
    how many bytes are copied is counted. The file and its checksum are those of copies. The twin:
    one that starts between two blocks is copied, and is right as well.
    """
    region = native.Region(2 * nbytes + 8192, True, 1)
    both = native.tensor_at(region, region.address, 2 * nbytes + 8192, torch.uint8)
    both.random_()
    copied, copy = [], native.copy_flat
    monkeypatch.setattr(
        native,
        "copy_flat",
        lambda target, source: (copied.append(source.numel()), copy(target, source)),
    )
    for shift in (0, 8):
        tensors = {
            "one": both[shift : shift + nbytes],
            "two": both[shift + nbytes : shift + 2 * nbytes],
        }
        tensors["rest"] = torch.arange(first % 251, first % 251 + first).to(torch.uint8)
        homes = {
            name: HomeValues(None, SimpleNamespace(flat=t, dtype=t.dtype), 0, (t.numel(),), (0,))
            for name, t in tensors.items()
        }
        slots, counts = make_slots(nbytes), {}
        for stay in (True, False):
            copied.clear()
            values = homes if stay else tensors
            with start_file(tmp_path / f"{stay}", values, slots, metadata={}) as file:
                counts[stay] = file.finish(), sum(copied)
        assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes() and counts[
            True
        ][0] == counts[False][0]
        assert all(
            torch.equal(tensor, tensors[name])
            for name, tensor in load_file(tmp_path / "True").items()
        )
        saved = counts[False][1] - counts[True][1]
        assert (
            saved == 0
            if shift or first % 8
            else saved > 2 * (nbytes - 2 * 65536) and saved % 65536 == 0
        )
        assert slots.leased_nbytes == 0


def test_what_may_change_is_copied_before_the_start_returns(tmp_path):
    """The twin of what stays."""
    region = native.Region(SLOT_NBYTES, True, 1)
    tensor = native.tensor_at(region, region.address, SLOT_NBYTES, torch.uint8)
    with start_file(tmp_path / "file", {"t": tensor}, make_slots(SLOT_NBYTES), metadata={}) as file:
        tensor.fill_(7)
        file.finish()
    assert not load_file(tmp_path / "file")["t"].any()


def test_files_of_one_save_take_turns_at_the_slots(tmp_path):
    """Method: three files are started with two slots, of which the first two are not finished when
    the third is begun."""
    slots, tensors = make_slots(1), some_tensors(5 * MIB)
    assert slots.capacity_nbytes == 2 * SLOT_NBYTES
    files = [start_file(tmp_path / str(index), tensors, slots, metadata={}) for index in range(3)]
    entries = [file.finish() for file in files]
    assert len({entry["crc32c"] for entry in entries}) == 1
    assert all(
        torch.equal(load_file(tmp_path / str(index))["large"], tensors["large"])
        for index in range(3)
    )
    assert slots.leased_nbytes == 0


@pytest.mark.parametrize(
    ("fault", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC), ("hang", errno.ETIMEDOUT)]
)
def test_a_disk_that_refuses_or_hangs_is_an_error_and_not_a_wait_for_a_slot(
    fault, number, tmp_path, monkeypatch
):
    """Method: every write from the second on fails or never ends, of a file that needs each of two
    slots three times."""
    plan = doubles.FaultPlan()
    plan.first_piece = 1
    setattr(plan, fault, 1.0)
    monkeypatch.setenv("INFINITY_IO_TIMEOUT", "0.5")
    original = native.make_io_engine
    with monkeypatch.context() as patch:
        patch.setattr(
            native,
            "make_io_engine",
            lambda **options: original(layer=doubles.layer(plan), **options),
        )
        with pytest.raises(infinity.StorageError) as raised:
            written(tmp_path / "file", some_tensors(5 * SLOT_NBYTES), make_slots(1))
    assert raised.value.errno == number and str(tmp_path) in str(raised.value)
    written(tmp_path / "file", some_tensors(5 * SLOT_NBYTES), make_slots(1))  # the twin


def test_a_bit_in_any_part_of_any_file_is_found(tmp_path, monkeypatch):
    """Method: four files, checked in stretches of 4 KiB, each in reads of 1 KiB; a bit is flipped
    in the first, the last or any other byte of one: its name is told. Untouched they are right, the
    empty one too."""
    monkeypatch.setattr(manifest, "STRETCH_NBYTES", 4096)
    monkeypatch.setattr(manifest, "READ_NBYTES", 1024)
    sizes = {"a": 1, "b": 50_000, "c": 8192}
    files = {
        name: written(tmp_path / name, {"t": torch.randint(0, 256, (size,), dtype=torch.uint8)})
        for name, size in sizes.items()
    }
    (tmp_path / "nothing").write_bytes(b"")
    files["nothing"] = {"nbytes": 0, "crc32c": 0}
    check_files(tmp_path, files)
    for name in sizes:
        whole = (tmp_path / name).read_bytes()
        for at in (0, 1023, 1024, 4095, 4096, len(whole) // 2, len(whole) - 1):
            if at < len(whole):
                (tmp_path / name).write_bytes(
                    whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]
                )
                with pytest.raises(infinity.CorruptionError, match=f"{name} was changed"):
                    check_files(tmp_path, files)
        (tmp_path / name).write_bytes(whole[:-1])
        with pytest.raises(infinity.CorruptionError, match="truncated"):
            check_files(tmp_path, files)
        (tmp_path / name).write_bytes(whole)
    check_files(tmp_path, files)
