"""Push: sends the saved folder to the Hugging Face hub, and finds before the training what would
prevent it."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote

from ...errors import ConfigError, StorageError
from .wording import first_line


def check_push(args: argparse.Namespace) -> None:
    """Raises ConfigError if ``--push`` cannot work: without a folder, a login or a network, with a
    name that is none, for a repository that is there, or with other outputs in the folder. Sets
    ``args.push`` to the whole name."""
    if args.push is None:
        return
    if args.out is None:
        raise ConfigError("--push sends the saved folder: add --out FOLDER")
    for option in ("checkpoint", "tensorboard", "trace"):
        path = getattr(args, option)
        if path is not None and path.resolve().is_relative_to(args.out.resolve()):
            raise ConfigError(
                f"--{option} {path} lies in --out {args.out} and would be sent along. Give another"
                " place."
            )
    there = sorted(each.name for each in args.out.iterdir()) if args.out.is_dir() else []
    if foreign := [name for name in there if name.startswith(".") or (args.out / name).is_dir()]:
        raise ConfigError(
            f"--out {args.out} holds {foreign[0]}, which would be sent along. Move it, or give"
            " another folder."
        )
    try:
        import huggingface_hub
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise ConfigError("--push needs huggingface_hub: pip install huggingface_hub") from None
    try:
        validate_repo_id(args.push)
    except ValueError:
        raise ConfigError(
            f"--push {args.push} is no name on the Hugging Face hub. Give it as NAME or USER/NAME"
        ) from None
    if huggingface_hub.is_offline_mode():
        raise ConfigError("--push needs the network, and HF_HUB_OFFLINE is set: unset it")
    if huggingface_hub.get_token() is None:
        raise ConfigError("--push needs a login on the Hugging Face hub: hf auth login")
    api = huggingface_hub.HfApi()
    try:
        if "/" not in args.push:
            args.push = f"{api.whoami()['name']}/{args.push}"
        is_there = api.repo_exists(args.push)
    except Exception as error:
        raise ConfigError(
            f"--push {args.push}: the hub does not answer to this login:"
            f" {first_line(error).rstrip('.')}. Log in again: hf auth login"
        ) from error
    if is_there and not (args.overwrite or args.resume):
        raise ConfigError(
            f"--push {args.push} is on the hub already. Give another name, or --overwrite to commit"
            " to it."
        )


def make_repository(name: str) -> None:
    """Makes a private repository, unless there is one: a login that may not write is found before
    the first step. Raises ConfigError."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(name, private=True, exist_ok=True)
    except Exception as error:
        raise ConfigError(
            f"--push {name} cannot be made on the hub: {first_line(error).rstrip('.')}. Log in with"
            " a token that may write: hf auth login"
        ) from error


def push(name: str, folder: Path) -> str:
    """Sends the files of ``folder`` as one commit, and returns its address. Raises StorageError,
    which says how to send them again."""
    from huggingface_hub import HfApi

    try:
        return str(
            HfApi().upload_folder(
                repo_id=name, folder_path=folder, commit_message="Upload what infinity trained"
            )
        )
    except Exception as error:
        raise StorageError(
            f"{folder} is saved, and was not sent to {name}: {first_line(error).rstrip('.')}. Send"
            f" it with: hf upload {name} {quote(str(folder))}"
        ) from error
