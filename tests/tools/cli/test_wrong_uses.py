"""Wrong uses of the command line: what people mistype, mix up or misunderstand.

Words used here:

**use**: a command line without its "infinity", after shell variables that it is run under. Its
first word may stand for more (SHORT).
**answered**: exit status 2, one message on stderr, which names cause and remedy; nothing on stdout,
no file written.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from lazily import need

need("trl", "peft", "gguf")

from chatty import chat_of, save_base

from infinity.tools.cli import SUBCOMMANDS, main
from infinity.tools.watch import run_files

SMALL = (
    "--steps 1 --batch-size 2 --sequence-length 16 --eval-batches 1 --sample-bytes 4 --dtype fp32"
    " --device cpu"
)
SHORT = {
    "job": f"train --model base --data text.txt {SMALL}",
    "learn": f"train --model base {SMALL} --data",
    "tune": f"train --data text.txt {SMALL} --model",
    "tiny": "plan --model model.json --device-memory 8MiB --host-memory 64MiB",
    "say": "generate base --prompt hi",
    "grid": "attention 64 --q-tile 8 --kv-tile 8",
}
HELP = "--help` lists all options"
SIZE = "give bytes as a whole number, or text such as '48GiB'"
ELSEWHERE = "Nothing is written where something is read: give another place"
ANOTHER = "Give another name, or --overwrite"
OTHER_FOLDER = "Give another folder, or --overwrite"
DEVICES = "give 'cuda', 'cuda:1' or 'cpu'"
MODELS = "folder with config.json and safetensors, a config.json, or a name on the Hugging Face hub"
COLUMNS = "Needed is one of: messages or conversations; prompt"
HOMES = "choose from 'auto', 'device', 'host', 'nvme'"

USES: dict[str, tuple[str, str]] = {  # use -> patterns of its cause and of its remedy
    # --- the command itself ---
    "": ("required: <subcommand>", HELP),
    "--json": ("required: <subcommand>", HELP),
    "trian": ("invalid choice: 'trian'", "did you mean train"),
    "Train --model base": ("invalid choice: 'Train'", "did you mean train"),
    "finetune base": ("invalid choice: 'finetune'", "choose from .*'train'"),
    "chat base": ("invalid choice: 'chat'", "choose from .*'generate'"),
    "help train": ("invalid choice: 'help'", HELP),
    # --- attention ---
    "attention": ("required: SHAPE, --window, --q-tile, --kv-tile", HELP),
    "grid --window 65": ("tokens 64, window 65", "give a window from 2 to 64"),
    "grid --window 8 --stride 9": ("stride 9", "give a stride from 1 to 8"),
    "grid --window 8,8": ("window=.8, 8. has 2 values", "for 1 axes"),
    "grid --window 8 --kv-tile 0": ("--kv-tile: 0 given", "1 or more needed"),
    "grid --window 8 --causal yes": ("--causal: 'yes' is not a whole number", HELP),
    "grid --window 8 --share 60": ("--share: '60' is not a share", "a percentage as 2%"),
    "attention 2097152 --window 8 --q-tile 8 --kv-tile 8": ("SHAPE 2097152", "at most 1048576"),
    # --- bench ---
    "bench disk": ("choose from machine, io, adam, copy, gpu, all", "`python -m bench disk` from"),
    "bench io adm": ("adm is not a benchmark", "did you mean adam?"),
    "bench io --bound 0.1": ("--bound is of `infinity bench compare`", "leave it out"),
    "bench io --machine-file m.toml": ("--machine-file is of `bench machine`", "leave it out"),
    "bench compare a.json --rounds 3": ("--rounds is of measuring", "leave it out"),
    "bench compare a.json --csv --tex": ("each need stdout", "give one"),
    "bench compare none.json": ("none.json cannot be read", "No such file"),
    "bench --folder . --folder base": ("two are on one disk", "give one of each"),
    "bench io --resume r.json --save r": ("--resume goes on in its own file", "leave out --save"),
    "bench compare": ("takes two result files or more", "one and this machine"),
    "bench io --nvme-path nvme": ("unrecognized arguments: --nvme-path nvme", HELP),
    "bench all --rounds 0": ("--rounds: 0", "1 or more needed"),
    "bench adam --threads -1": ("--threads: -1", "1 or more needed"),
    "bench adam --scale nan": ("--scale nan", "above 0, and at most 100"),
    "bench adam --scale 0": ("--scale 0", "above 0, and at most 100"),
    "bench adam --scale 1e9": ("--scale 1000000000", "above 0, and at most 100"),
    "bench adam --save text.txt": ("text.txt is a file that was not made by Infinity", ANOTHER),
    "bench train": ("The engine's own benchmarks", "`python -m bench train` from"),
    # --- clean, completion, env ---
    "clean --all": ("unrecognized arguments: --all", HELP),
    "clean nvme --force": ("unrecognized arguments: --force", HELP),
    "completion fish": ("invalid choice: 'fish'", "choose from 'bash', 'zsh'"),
    "completion powershell": ("invalid choice: 'powershell'", "choose from 'bash', 'zsh'"),
    "completion bash zsh": ("unrecognized arguments: zsh", HELP),
    # --- cost, fleet ---
    "cost": ("required: --profile, --prices", HELP),
    "cost --profile model.json --prices text.txt --tokens 2G": (
        "2G.* not a number of tokens",
        "as 2B",
    ),
    "cost --profile model.json --prices text.txt --tokens 2B": ("has no .gpus", "infinity train"),
    "fleet": ("required: JOBS", HELP),
    "fleet none.toml": ("none.toml cannot be read", "Give one of TOML"),
    "fleet text.txt": ("text.txt is neither valid TOML", "no JSON|JSON"),
    "fleet model.json": ("needs tables \\[workers.NAME\\]", "at least one"),
    "fleet none.toml --policy fair": ("invalid choice: 'fair'", "choose from 'max-min'"),
    "env nvme": ("unrecognized arguments: nvme", HELP),
    "env --nvme-path": ("--nvme-path: expected one argument", HELP),
    "env --path nvme": ("unrecognized arguments: --path", "did you mean --nvme-path"),
    "INFINITY_SIMD=sse env": ("INFINITY_SIMD=sse is not one", "units: .*scalar"),
    "INFINITY_IO=aio env": ("INFINITY_IO=aio is not one", "auto, uring, threads"),
    # --- run ---
    "run": ("required: SCRIPT", HELP),
    "run nowhere.py": ("there is no script nowhere.py", "infinity run --params host train.py"),
    "run --params host --lr 0.1 train.py": ("unrecognized arguments: --lr", "come after its name"),
    "run --parms host train.py": ("unrecognized arguments: --parms", "did you mean --params"),
    "run --params tape text.txt": ("invalid choice: 'tape'", HOMES),
    "run base": ("base is a folder", "name the script in it"),
    "run -m nowhere.train": ("no module nowhere.train", "Name one that"),
    "run --host-memory lots text.txt": ("host_memory='lots'|--host-memory lots", SIZE),
    "run --nvme-path none text.txt": ("No such folder for swap files", "mkdir -p none"),
    # --- eval ---
    "eval": ("required: PATH", HELP),
    # --- verify ---
    "verify": ("required: RECEIPT", HELP),
    "verify nowhere.json": ("no such receipt: nowhere.json", "--receipt has written|no such"),
    "verify model.json": ("model.json is no receipt", "give a file that --receipt has written"),
    "eval base": ("give --tasks NAME,NAME or --data PATH", "what is to be measured"),
    "eval base --data text.txt --tasks arc_easy": ("--data PATH, not both", "to be measured"),
    "eval nowhere --data text.txt": ("No such model: nowhere", MODELS),
    "eval model.json --data text.txt": ("model.json is a file", "give the folder of a model"),
    "eval bare --data text.txt": ("No safetensors in bare", "For fresh weights give"),
    "eval base --data nowhere.jsonl": ("No such data: nowhere.jsonl", "Give --data a file"),
    "eval base --data unknown.jsonl": ("has the columns a, b", COLUMNS),
    "eval base --data pairs.jsonl": ("has preferred answers", "dpo to `infinity train`"),
    "eval model --data chat.jsonl": ("model", "transformers cannot read model"),
    "eval mute --data chat.jsonl": ("need a model with a tokenizer", "give a folder that has"),
    "eval base --data short.txt": ("short.txt holds 10 tokens", "length 10 or"),
    "eval base --data text.txt --pack": ("--pack is for samples", "Leave it out"),
    "eval base --data text.txt --sequence-length 97": ("exceeds the model's 96", "Give 96 or less"),
    "eval base --data text.txt --limit 3": ("--limit is for --tasks", "leave it out"),
    "eval base --data text.txt --num-fewshot 0": ("--num-fewshot is for --tasks", "leave it out"),
    "eval base --tasks arc_easy --held-out": ("--held-out is for --data", "leave it out"),
    "eval base --tasks ,": ("--tasks names no task", "give as many as you like"),
    "eval base --tasks gone.yaml": ("there is no file gone.yaml", "give the path of one"),
    "eval base --tasks arc_easy --include gone": ("--include gone is no folder", "give one with"),
    "eval base --data text.txt --batch-size 0": ("--batch-size: 0 given", "1 or more needed"),
    "eval base --data text.txt --params tape": ("invalid choice: 'tape'", HOMES),
    "eval base --data text.txt --task arc_easy": ("unrecognized arguments: --task", "--tasks"),
    "eval --model base --data text.txt": ("unrecognized arguments: --model|required", "PATH|MODEL"),
    "report run --eval gone.json": (
        "--eval gone.json cannot be read: No such",
        "infinity eval --json",
    ),
    "report run --eval model.json": ("model.json is not what", "infinity eval --json"),
    # --- export ---
    "export": ("required: (?i:checkpoint, out)", HELP),
    "export base": ("required: (?i:out)", HELP),
    "export base out more": ("unrecognized arguments: more", HELP),
    "export base base": ("is what CHECKPOINT base reads", ELSEWHERE),
    "export base base/merged": ("lies in base, which CHECKPOINT reads", ELSEWHERE),
    "export base .": ("has base inside", ELSEWHERE),
    "export base text.txt": ("OUT text.txt is a file", "Give a folder"),
    "export base /dev/null": ("OUT /dev/null is a file", "Give a folder"),
    "export base taken": ("holds files already .notes.txt.", OTHER_FOLDER),
    "export base model": ("holds files already .config.json", OTHER_FOLDER),
    "export base out --dtype fp8": ("invalid choice: 'fp8'", "choose from 'fp32', 'bf16', 'fp16'"),
    "export base out --dtype bfloat16": ("invalid choice: 'bfloat16'", "did you mean bf16"),
    "export base out --max-shard-size 5GB": ("unrecognized arguments: --max-shard-size", HELP),
    "export checkpoint out --merge adapter": ("needs the model's config.json", "--model DIR"),
    "export base out --model empty": ("empty has no config.json", "give the folder that the model"),
    # --- generate ---
    "generate": ("required: PATH", HELP),
    "generate base": ("--prompt TEXT or --chat", '--prompt "-" reads from stdin'),
    "generate base --raw": ("--prompt TEXT or --chat", "reads from stdin"),
    "say --chat": ("--prompt TEXT or --chat", "not both"),
    "generate base --prompt": ("--prompt: expected one argument", HELP),
    "generate base --prompt ''": ("prompt is empty", "give the text"),
    "generate base --prompt ' '": ("prompt is empty", "give the text"),
    "generate nowhere --prompt hi": ("No such model: nowhere", MODELS),
    "generate base --chat --json": ("a chat has many answers", "for --prompt"),
    "generate base --chat --raw": ("a chat has many answers", "for --prompt"),
    f"generate base --prompt {'x' * 99}": ("102 tokens, and the model takes 96", "give "),
    "say --temperature -1": ("--temperature: -1", "0 or more needed"),
    "say --top-p 0": ("--top-p 0", "more than 0 and at most 1"),
    "say --top-p 90": ("--top-p 90", "more than 0 and at most 1"),
    "say --top-p nan": ("--top-p nan", "more than 0 and at most 1"),
    "say --max-new-tokens 0": ("--max-new-tokens: 0 given", "1 or more needed"),
    "say --max-tokens 20": ("unrecognized arguments: --max-tokens", "mean --max-new-tokens"),
    "say --load-in-4bit": ("unrecognized arguments: --load-in-4bit", HELP),
    "say --params gpuu": ("invalid choice: 'gpuu'", HOMES),
    "say --dtype 4bit": ("invalid choice: '4bit'", "choose from 'auto', 'bf16', 'fp32'"),
    "say --device gpu": ("'gpu' is not a device", DEVICES),
    "say --device 0": ("'0' is not a device", DEVICES),
    "say --device cuda:x": ("'cuda:x' is not a device", DEVICES),
    "say --host-memory '8 gigs'": ("'8 gigs' is not a size", SIZE),
    "say --host-memory -1": ("'-1' is not a size", SIZE),
    "say --device-memory 80%": ("'80%' is not a size", SIZE),
    "say --params nvme --nvme-path nowhere": ("no folder .*nowhere", "Create it, or name another"),
    "INFINITY_IO_TIMEOUT=soon say": ("=soon is not a number", "of seconds above 0"),
    # --- plan ---
    "tiny --optimizer adamw": ("--optimizer: invalid choice: 'adamw'", HOMES),
    "tiny --activations recompute": ("invalid choice: 'recompute'", HOMES),
    "tiny --master fp16": ("invalid choice: 'fp16'", "choose from 'split', 'fp32', 'none'"),
    "tiny --moments int4": ("invalid choice: 'int4'", "did you mean int8"),
    "tiny --batch-size 0": ("--batch-size: 0", "1 or more needed"),
    "tiny --batch-tokens 33 --sequence-length 16": ("--batch-tokens 33", "multiple of .* as 32"),
    "tiny --batch-tokens 32 --batch-size 2": ("both size a step", "give one of them"),
    "tiny --sequence-length 1": ("--sequence-length: 1", "2 or more"),
    "tiny --sequence-length 99999": ("exceeds the model's 32 positions", "Give 32 or less"),
    "tiny --nodes 0": ("--nodes: 0", "1 or more needed"),
    "tiny --machine 4090": ("--machine 4090", "did you mean rtx4090"),
    "tiny --machine text.txt": ("--machine text.txt", "Give a TOML file, or one of .*h100"),
    "tiny --params nvme --nvme-path nowhere": ("No such folder .*: 'nowhere'", "mkdir -p nowhere"),
    "tiny --params nvme --nvme-path text.txt": ("text.txt is a file", "give a folder"),
    "tiny --svg nvme": ("--svg nvme is a folder", "Give the name of a file"),
    "tiny --svg mine.svg": ("mine.svg is a file that was not made by Infinity", ANOTHER),
    "tiny --svg model.json": ("is what --model model.json reads", ELSEWHERE),
    "tiny --config nowhere.toml": ("No such configuration: nowhere.toml", "Give --config a TOML"),
    "tiny --config parms.toml": ("unknown config key 'parms'", "did you mean 'params'"),
    "tiny --config list.json": ("list.json holds", "Give names and values, as"),
    "tiny --config gpu.toml": ("params='gpu' is not one of", "did you mean 'device'"),
    "tiny --deepspeed stage7.json": ("stage=7", "is not 0, 1, 2 or 3"),
    "tiny --gpus 8": ("unrecognized arguments: --gpus 8", HELP),
    "tiny --seq-len 16": ("unrecognized arguments: --seq-len", "did you mean --sequence-length"),
    "plan --model nowhere": ("No such model: nowhere", MODELS),
    "plan --model Llama-8B": ("No such model: Llama-8B", "did you mean llama-8b"),
    "plan --model acme/gone": ("acme/gone; .* cannot be fetched: no network", "`hf download acme"),
    "plan --model model.json --device-memory '80 gigs'": ("'80 gigs' is not a size", SIZE),
    "plan --model model.json --device-memory 80GiB,80GiB": ("80GiB,80GiB' is not a size", SIZE),
    "plan --model model.json --nvme-capacity=-2TiB": ("'-2TiB' is not a size", SIZE),
    "plan --model model.json --host-memory 0%": ("0% is not a share", 'Give more than 0, as "25%"'),
    "plan --model llama-8b --machine laptop --params device": (
        "device.memory is 6.7 GiB .* the least that works here is",
        r"MiB\. Give the weights a lower home",
    ),
    # --- report, top, trace ---
    "report": ("has no run", "`infinity train` .* a loop with infinity.Watch"),
    "report nowhere": ("nowhere has no run", "the newest is shown without RUN"),
    "report --steps 0": ("--steps: 0", "1 or more needed"),
    "report run --out nvme": ("--out nvme is a folder", "Give the name of a file"),
    "report run --out text.txt": ("text.txt is a file that was not made by Infinity", ANOTHER),
    "report one two": ("unrecognized arguments: two", HELP),
    "top base": ("base has no status of a job", "give the folder that infinity.Watch wrote to"),
    "top --interval 0": ("--interval 0", "give 0.05 to 3600 seconds"),
    "top --interval nan": ("--interval nan", "give 0.05 to 3600 seconds"),
    "top --json --interval 1e9": ("--interval 1000000000", "give 0.05 to 3600 seconds"),
    "top --pid 3": ("unrecognized arguments: --pid", HELP),
    "trace": ("required: file", HELP),
    "trace t.json --steps -1": ("--steps: -1", "0 or more needed"),
    "trace t.json --svg t.json": ("is what FILE t.json reads", ELSEWHERE),
    "trace t.json --svg nvme": ("--svg nvme is a folder", "Give the name of a file"),
    "trace t.json --svg mine.svg": ("mine.svg is a file that was not made by Infinity", ANOTHER),
    "trace t.json --last 3": ("unrecognized arguments: --last", "did you mean --steps"),
    # --- train: numbers ---
    "job --steps 0": ("--steps: 0 given", "1 or more needed"),
    "job --steps all": ("--steps: 'all' is not a whole number", HELP),
    "job --epochs -1": ("--epochs: -1 given", "more than 0 needed"),
    "job --epochs nan": ("--epochs: nan given", "more than 0 needed"),
    "job --epochs 3": ("--steps and --epochs both", "give one of them"),
    "job --batch-size auto": ("--batch-size: 'auto' is not a whole number", HELP),
    "job --sequence-length 1": ("--sequence-length: 1 given", "2 or more .*needed"),
    "job --sequence-length 4096": ("exceeds the model's 96 positions", "Give 96 or less"),
    "job --accumulate 0": ("--accumulate: 0 given", "1 or more needed"),
    "job --lr 0": ("--lr: 0 given", "more than 0 needed"),
    "job --lr nan": ("--lr: nan given", "more than 0 needed"),
    "job --weight-decay -0.1": ("--weight-decay: -0.1 given", "0 or more needed"),
    "job --warmup-steps -1": ("--warmup-steps: -1 given", "0 or more needed"),
    "job --max-grad-norm 0": ("--max-grad-norm: 0 given", "more than 0 needed"),
    "job --seed -1": ("--seed: -1 given", "0 or more needed"),
    "job --threads 0": ("--threads: 0 given", "1 or more needed"),
    "job --lora-rank 0": ("--lora-rank: 0 given", "1 or more needed"),
    "job --checkpoint-every 0": ("--checkpoint-every: 0 given", "1 or more needed"),
    "job --data-limit '64 megs'": ("'64 megs' is not a size", SIZE),
    "job --host-memory 101x%": ("101x% is not a share", 'or bytes, as "256MiB"'),
    "job --params device --device-memory 100KiB": (
        "device.memory is 100.0 KiB",
        "Raise .*device.mem",
    ),
    # --- train: options ---
    "job --shard full": ("invalid choice: 'full'", "choose from 'optimizer', 'gradients'"),
    "job --moments 8bit": ("invalid choice: '8bit'", "choose from 'fp32', 'bf16', 'int8'"),
    "job --dtype bfloat16": ("invalid choice: 'bfloat16'", "did you mean bf16"),
    "job --preset qlora": ("invalid choice: 'qlora'", "did you mean lora"),
    "job --preset": ("--preset: expected one argument", HELP),
    "job --fp16": ("unrecognized arguments: --fp16", HELP),
    "job --num-train-epochs 3": ("unrecognized arguments: --num-train-epochs", "mean --epochs"),
    "job --max-steps 10": ("unrecognized arguments: --max-steps", "did you mean --steps"),
    "job --dataset text.txt": ("unrecognized arguments: --dataset", "did you mean --data"),
    "job --device 1": ("'1' is not a device", DEVICES),
    "job --device cuda": ("--device cuda: .* finds no GPU here", "`infinity env`"),
    "job --preset cpu-only --device cuda:0": ("--device cuda:0: .* finds no GPU", "`infinity env`"),
    "job --nvme-path nvme,empty": ("No such folder .*: 'nvme,empty'", "mkdir -p"),
    "train --preset lora": ("adapters of a model that has weights", "give --model a folder"),
    "tune model.json --lora-rank 8": ("adapters of a model that has weights", "--model a folder"),
    "job --resume": ("--resume has nowhere to look", "Add --checkpoint FOLDER"),
    "job --resume --overwrite --checkpoint new": ("continues .* replaces", "give one of them"),
    "INFINITY_SIMD=sse job": ("INFINITY_SIMD=sse is not one", "units: .*scalar"),
    "WORLD_SIZE=2 job": ("2 that were launched together .WORLD_SIZE.", "remove WORLD_SIZE"),
    # --- train: files of options ---
    "job --config top.toml": ("unknown config key 'steps'", "go into the table train"),
    "job --config typo.toml": ("train.stpes is not an option", "did you mean steps"),
    "job --config switch.toml": ("train.resume is a str", "give true or false"),
    "job --config nested.toml": ("train.model is a dict", "give text, a number, or a list"),
    "job --config gigs.toml": ("host_memory='8 gigs' is not a size", SIZE),
    "job --config list.json": ("list.json holds", "Give names and values, as"),
    "job --deepspeed stage7.json": ("stage=7", "is not 0, 1, 2 or 3"),
    # --- train: models ---
    "tune nowhere": ("No such model: nowhere", MODELS),
    "tune bsae": ("No such model: bsae", "did you mean base"),
    "tune 'C:\\models\\base'": (r"No such model: C:\\models\\base", MODELS),
    "tune acme/gone": ("acme/gone; .* cannot be fetched: no network", "`hf download acme/gone"),
    "tune model.gguf": ("model.gguf is a model in GGUF", "give --model a folder with the file"),
    "tune base/model.safetensors": ("is not a model", "Give --model a folder, or a config.json"),
    "tune bare": ("No safetensors in bare", "For fresh weights give --model bare/config.json"),
    "tune adapter": ("adapter is an adapter", "give --model the folder of its base, or merge both"),
    "tune checkpoint": ("checkpoint is a checkpoint", "`infinity export .*--resume --checkpoint"),
    "tune vit": ("vit is of ViTConfig", "only models that continue text are taken"),
    "tune few": ("vocabulary has 10 entries .* needs 261", "Give another model"),
    "learn chat.jsonl --model model.json": ("need a model with a tokenizer", "a folder that has"),
    # --- train: data ---
    "learn nowhere": ("No such data: nowhere", "Give --data a file of samples"),
    "learn tex.txt": ("No such data: tex.txt", "Did you mean text.txt"),
    "learn tatsu-lab/alpaca": ("No such data: tatsu-lab/alpaca", "Give --data a file of samples"),
    "learn empty": ("No text files in empty", "Give --data a text file, or a folder"),
    "learn base": ("base is the folder of a model", "give the data it is to learn"),
    "learn short.txt": ("10 tokens.* needs 32", "Give more data, or --sequence-length 5 or less"),
    "learn latin.txt": ("latin.txt is not UTF-8 text", "Convert it: iconv -f LATIN1"),
    "learn latin.jsonl": ("latin.jsonl is not UTF-8 text", "Convert it: iconv -f LATIN1"),
    "learn both": ("both running text .a.txt. and samples .b.jsonl", "Give one of them"),
    "learn kinds": ("files of several kinds .csv, json.", "Give one of them"),
    "learn unknown.jsonl": ("has the columns a, b", COLUMNS),
    "learn tokens.jsonl": ("has the columns input_ids, labels", COLUMNS),
    "learn headless.csv": ("has the columns hi, ho", COLUMNS),
    "learn semicolon.csv": ("has the columns prompt;completion", "separated by commas"),
    "learn pairs.jsonl": ("has preferred answers", "add --method dpo"),
    "learn norole.jsonl": ("one has no role", "a message needs role and content"),
    "learn noanswer.jsonl": ("no conversation has an answer", "a message of the role assistant"),
    "learn one.jsonl": ("2 samples are needed", "Give more data, or a larger --sequence-length"),
    # --- train: outputs ---
    "job --out base": ("is what --model base reads", ELSEWHERE),
    "job --out base/tuned": ("lies in base, which --model reads", ELSEWHERE),
    "job --out .": ("has base inside", ELSEWHERE),
    "job --out text.txt": ("--out text.txt is a file", "Give a folder"),
    "job --out taken": ("holds files already .notes.txt.", OTHER_FOLDER),
    "job --checkpoint new --out new": ("are both new", "Give each a place of its own"),
    "job --checkpoint text.txt": ("--checkpoint text.txt is a file", "Give a folder"),
    "job --checkpoint checkpoint": ("holds a checkpoint already", "--resume or .* --overwrite or"),
    "job --checkpoint deepspeed": ("it is DeepSpeed's", "Give another folder"),
    "job --resume --checkpoint dcp": ("torch.distributed.checkpoint's", "Give another folder"),
    "job --resume --checkpoint trainer": ("it is the Trainer's", "resume_from_checkpoint"),
    "train --resume --checkpoint nowhere": ("nowhere has no checkpoint", "give --model and --data"),
    "tune deepspeed/global_step10/mp_rank_00_model_states.pt": (
        "is not a model",
        "`infinity export deepspeed.*pt OUT --model FOLDER` makes",
    ),
    "job --resume --checkpoint model": (
        "a model's weights alone",
        "load them with from_pretrained",
    ),
    "job --trace text.txt": ("is what --data text.txt reads", ELSEWHERE),
    "job --trace mine.svg": ("mine.svg is a file that was not made by Infinity", ANOTHER),
    "job --tensorboard text.txt": ("--tensorboard text.txt is a file", "Give a folder"),
    "job --log wanbd": ("--log wanbd is not a tracker of accelerate", "Known are .*wandb"),
    "job --log tensorboard,wandb": ("--log tensorboard,wandb is not a tracker", "once for each"),
    "job --method dpo --stalls 2": ("--stalls is not for the method dpo", "Leave it out"),
    "job --push mine": ("--push sends the saved folder", "add --out FOLDER"),
    "job --out new --push a/b/c": ("--push a/b/c is no name on the", "as NAME or USER/NAME"),
    "job --out new --checkpoint new/kept --push a": ("new/kept lies in --out new", "another place"),
    "top --prometheus figures.txt": ("neither a port nor a file .prom", HELP),
    "top --prometheus 70000": ("--prometheus: 70000 given", "at most 65535 possible"),
    "top --prometheus 0 --json": ("both say what to print", "give one of them"),
    "top --prometheus 0 --once": ("--once is of a file", "give --prometheus FILE.prom"),
    # --- what a first table of them was answered poorly ---
    "say --temperature nan": ("--temperature: nan", "given, 0 or more needed"),
    "say --seed 99999999999999999999999": (
        "--seed: 99999999999999999999999",
        "given, at most 9223372036854775807 possible",
    ),
    "generate few --prompt hi": (
        "The model's vocabulary has 10 entries but its",
        "Give another model",
    ),
    "job --device mps": (
        "--device mps: torch .* finds no device mps",
        "Leave it out, or give --device cpu",
    ),
    "job --data-limit 0": ("--data-limit 0", "give more than 0"),
    "learn dict.jsonl": ("must be a list of messages", 'as .{"role": "user"'),
    "RANK=0 WORLD_SIZE=x job": (
        "WORLD_SIZE='x' is not a number from 1 on",
        "Start the job with torchrun, or unset RANK",
    ),
    "RANK=0 WORLD_SIZE=0 job": (
        "WORLD_SIZE='0' is not a number from 1 on",
        "Start the job with torchrun, or unset RANK",
    ),
    "say --temperature inf": ("--temperature: inf", "given, a finite number needed"),
    "say --raw --system 'be nice'": (
        "--system is a message of a conversation",
        "which --raw leaves out",
    ),
    "say --temperature 0 --top-p 0.5": (
        "--temperature 0 takes the likeliest token",
        "leave --top-p out",
    ),
    "tiny --batch-size 99999999999999999999": (
        "--batch-size: 99999999999999999999",
        "given, at most 2147483647 possible",
    ),
    "tiny --nodes 2": ("--nodes is of a machine that is named", "add --machine"),
    "tiny --timetable": ("--timetable is of a machine that is named", "add --machine"),
    "tiny --config typo.toml": ("train.stpes is not an option of", "did you mean steps"),
    "job --lora-rank 999": ("--lora-rank 999 is more than the model's width 32", "give less"),
    "job --warmup-steps 100": ("--warmup-steps 100 is more than --steps 1", "give at most as many"),
    "job --data-limit 10": (
        "text.txt holds 11 tokens, but a sequence length of",
        "Give more data, or --sequence-length 5 or",
    ),
    "job --checkpoint-every 5": ("--checkpoint-every needs a folder", "add --checkpoint FOLDER"),
    "job --checkpoint-overhead 2%": ("--checkpoint-overhead needs a", "add --checkpoint FOLDER"),
    "job --checkpoint x --checkpoint-overhead 200%": (
        "--checkpoint-overhead: '200%' is not a share",
        "a percentage as 2%",
    ),
    "job --checkpoint x --checkpoint-overhead 2% --checkpoint-every 5": (
        "both say how often to save",
        "give one of them",
    ),
    "job --prompt hi": ("--prompt is of the sample of a saved model", "add --out FOLDER"),
    "job --micro-batch 7": (
        "--micro-batch 7 is more than --batch-size 2: it is",
        "Give less, or leave it out",
    ),
    "job --nvme-path ''": ("--nvme-path: an empty path given: name a file or", HELP),
    "clean ''": ("FOLDER: an empty path given: name a file or folder", HELP),
    "job --data base/config.json": (
        "--data: base/config.json is the folder of a model,",
        "give the data it is to learn",
    ),
    "learn nocontent.jsonl": ("sample 1: a message needs role and content", "one has no content"),
    "bench adam --out x --rounds 1 --scale 0.0001": (
        "--out is of `python -m bench report`",
        "leave it out",
    ),
    "trace t.json --svg a.png": ("--svg: a.png: the picture is an SVG", "name it ..svg"),
    "job --deepspeed model.json": (
        "model.json is not a DeepSpeed configuration: it has the keys",
        "Give one that has zero_optimization",
    ),
    "INFINITY_DIRECT=yes job --params nvme --nvme-path nvme": (
        "INFINITY_DIRECT=yes is not one of",
        "auto, off",
    ),
    "tune binonly": ("No safetensors in binonly", "Make them of its .bin files: `infinity export"),
    "learn picture.png": (
        "--data: picture.png is a picture .PNG.",
        "Give what is to be learned as text, JSON",
    ),
    "learn book.pdf": (
        "--data: book.pdf is a PDF: extract its text first",
        "Give what is to be learned as text, JSON",
    ),
    "learn utf16.txt": (
        "--data: utf16.txt is not UTF-8 text",
        "Convert it: iconv -f UTF-16 -t UTF-8",
    ),
    "learn chat.jsonl.gz": ("--data: chat.jsonl.gz is compressed", "Unpack it first, with gunzip"),
    "learn tokens.npy": (
        "--data: tokens.npy is a NumPy array. It is not read",
        "Give what is to be learned as text, JSON",
    ),
    "learn /dev/null": (
        "--data: /dev/null is not a regular file",
        "give a file or a folder",
    ),
    "learn '*.jsonl'": (
        "--data: ..jsonl is a pattern or a list",
        "Give one file, or the folder that has them",
    ),
    "train --output-dir out": ("unrecognized arguments: --output-dir out", "did you mean --out"),
    "train --lora much": ("--lora: 'much'", "a whole number"),
    "train --gradient-accumulation-steps 2": (
        "--gradient-accumulation-steps 2",
        "did you mean --accumulate",
    ),
    "generate --model base --prompt hi": (
        "unrecognized arguments: --model",
        "MODEL comes without an option",
    ),
    "completion --shell bash": ("unrecognized arguments: --shell", "SHELL comes without an option"),
    "train --lr -1e-4": ("--lr: -1e-4", "given, more than 0 needed"),
    "train --steps 1e3": ("--steps: '1e3' is not a whole number", "as 1000"),
    "train --max-grad-norm inf": ("--max-grad-norm: inf", "given, a finite number needed"),
    "export out base": ("there is no out", "CHECKPOINT comes first, then OUT"),
    "clean nvme --yes empty": ("unrecognized arguments: empty", HELP),
    "job --config windows.toml": ("No such folder for swap files: 'C:.+nvme'", "Create it first"),
    "plan --model empty": (
        "No config.json in empty: not a folder that",
        "Give --model one that has config.json and",
    ),
    "generate model.gguf --prompt hi": (
        "model.gguf is a model in GGUF without its configuration",
        "a folder with the file, its config.json and its tokenizer",
    ),
    "generate bare --prompt hi": ("No safetensors in bare", "For fresh weights give"),
    "tune lfs": (
        "lfs/model.safetensors is git-lfs's pointer to the",
        "fetch it with `git lfs pull`",
    ),
    "tune badtok": (
        "transformers cannot read the tokenizer in badtok",
        "its files are damaged, or of a kind that is",
    ),
    "plan --model vit": ("vit is of ViTConfig", "only models that continue text are taken"),
    "export base out --merge base": (
        "--merge base: no adapter_config.json in it",
        "give the folder that PEFT saved",
    ),
    "generate adapter --prompt hi": (
        "adapter has no adapter_model.safetensors",
        "give the folder that PEFT saved",
    ),
    "clean checkpoint": ("checkpoint/manifest.json is not a checkpoint's", "take an older save"),
    "learn python.jsonl": (
        "--data: datasets cannot read python.jsonl: JSON",
        "JSON needs double quotes: these are Python's",
    ),
    "learn latin.csv": ("datasets cannot read latin.csv", "iconv -f LATIN1"),
    "learn string.jsonl": ("must be a list of messages", 'as .{"role": "user"'),
    "trace nvme": ("nvme is a folder", "give the file that Config.trace"),
    "trace chat.jsonl": ("line 1, is not of a timeline", "give the file that Config.trace"),
    "report run": ("run is not a run, or damaged", "leave RUN out to see the newest"),
    "plan --model base --machine gone.toml": (
        "--machine gone.toml: there is no file gone.toml",
        "Give a TOML file, or one of a100, dgx-a100,",
    ),
    "say --device cuda": (
        "--device cuda: torch .* finds no GPU",
        "Leave it out, or give --device cpu",
    ),
    "job --out /proc/out": (
        "--out /proc/out cannot be written: No such file or",
        "Give another folder",
    ),
    "RANK=0 WORLD_SIZE=2 job": (
        "the 2 ranks of RANK and WORLD_SIZE do not come",
        "Start the job with torchrun, or unset RANK",
    ),
    "plan --batch-size 2.5": ("--batch-size: '2.5'", "is not a whole number"),
    "train --gradient-checkpointing=yes": (
        "--gradient-checkpointing:",
        "is a switch: leave out 'yes'",
    ),
    "job --config empty.json": (
        "config file empty.json is empty",
        "give keys and values, as ..params.: .nvme",
    ),
    "clean nowhere": ("nowhere is not a folder", "name folders that exist, or none"),
    "bench io --folder text.txt": (
        "--folder text.txt is a file",
        "give a folder on the disk to measure",
    ),
    "tiny --svg nowhere/a.svg": (
        "--svg nowhere/a.svg cannot be written: there is no",
        "Create it first: mkdir -p nowhere",
    ),
    "export nowhere out": ("there is no nowhere", "CHECKPOINT comes first, then OUT"),
    "export empty out": (
        "empty holds no complete checkpoint: there is no",
        "give the folder that a save, or a trainer,",
    ),
    "tune gguf": ("gguf is a model in GGUF without its", "give --model a folder with the file"),
    "learn empty.txt": ("--data: empty.txt is empty", "Give what is to be learned"),
    "generate mute --prompt hi": (
        "mute has no tokenizer: it cannot be given text",
        "Copy the tokenizer files of its base into it",
    ),
    "job --pack": (
        "--pack is for samples, and text.txt is running text",
        "Leave it out: every row of text is full",
    ),
    "train --model base --data text.txt --epochs 3": (
        "--epochs is for samples, and text.txt is running",
        "Give --steps",
    ),
    "train base text.txt": (
        "unrecognized arguments: base text.txt",
        "did you mean --model MODEL --data DATA",
    ),
    "tiny --deepspeed stage.json": ("zero_optimization=3", "is not a table of keys"),
    "learn roles.jsonl": (
        "roles.jsonl: sample 1",
        "narrator",
    ),
    "trace text.txt": ("holds no event", "give the file that Config.trace"),
    "--model base train": (
        "<subcommand>: invalid choice: 'base' .choose from",
        "the subcommand comes first",
    ),
    "say --seed -1": ("--seed: -1", "given, 0 or more needed"),
    "say --stream": ("unrecognized arguments: --stream", HELP),
    "tiny --stage 3": ("unrecognized arguments: --stage 3", "did you mean --deepspeed"),
    "train --validation-split 0.1": ("unrecognized arguments: --validation-split 0.1", HELP),
    "export base out --to gguf": ("unrecognized arguments: --to gguf", HELP),
    "export base out --gguf q8_0": ("--gguf q8_0 writes one file", "give its name, out.gguf"),
    "export base out.gguf": (
        "out.gguf is the name of a GGUF file",
        "add --gguf f16 .or bf16, or q8_0.",
    ),
    "export base out.gguf --gguf q4_k_m": ("invalid choice: 'q4_k_m'", "'f16', 'bf16', 'q8_0'"),
    "export base out.gguf --gguf bf16 --merge empty": (
        "--merge empty: no adapter_config.json in it",
        "give the folder that PEFT saved",
    ),
    "export base gguf/model.gguf --gguf f16": ("OUT gguf/model.gguf is a file", ANOTHER),
    "export base nowhere/m.gguf --gguf f16": ("there is no folder nowhere", "mkdir -p nowhere"),
    "export base base/m.gguf --gguf f16": ("lies in base, which CHECKPOINT reads", ELSEWHERE),
    "export vit out.gguf --gguf f16": (
        "not write a vit: .* llama, mistral, qwen2",
        "convert_hf_to_gguf.py",
    ),
    "export base/model.safetensors out.gguf --gguf f16": (
        "needs the model's config.json",
        "give the folder that has it, --model DIR",
    ),
    "export mute out.gguf --gguf f16": ("has none that is read", "--model DIR"),
    "export model.json out": ("model.json is not a checkpoint", "give its folder"),
    "export trainer out": (
        "not a checkpoint of Infinity; it is the Trainer's",
        "the files of its weights are not in it",
    ),
    "tiny --deepspeed gone.json": (
        "config file gone.json cannot be read: No such file",
        "Give one of TOML, YAML or JSON",
    ),
    "job --seed 9223372036854775808": (
        "--seed: 9223372036854775808",
        "given, at most 9223372036854775807 possible",
    ),
    "learn text.txt,short.txt": (
        "--data: text.txt,short.txt is a pattern or a list",
        "Give one file, or the folder that has them",
    ),
    "learn ''": ("--data: an empty path given: name a file or folder", HELP),
    "INFINITY_CACHE=text.txt job": (
        "INFINITY_CACHE=text.txt is a file",
        "name a folder, existing or new",
    ),
    "job --host-memory 8": ("--host-memory is 8 B", "Did you mean 8GiB"),
    "job --config hyphen.toml": ("unknown config key 'host-memory'", "did you mean 'host_memory'"),
}


def save_models(place: Path) -> None:
    """Folders of models, and what is taken for one."""
    save_base(place / "base")
    config = json.loads((place / "base" / "config.json").read_text())
    tiny = dict.fromkeys(("n_embd", "n_positions"), 32) | {"n_layer": 2, "n_head": 2}
    write(place / "model.json", json.dumps({"model_type": "gpt2", "vocab_size": 257} | tiny))
    for name, changes in (("bare", {}), ("few", {"vocab_size": 10}), ("vit", None)):
        shutil.copytree(place / "base", place / name)
        changed = {"model_type": "vit"} if changes is None else config | changes
        write(place / name / "config.json", json.dumps(changed))
    (place / "bare" / "model.safetensors").unlink()
    write(place / "model.gguf", b"GGUF\3\0\0\0" + bytes(64))
    write(place / "model" / "config.json", "{}")
    write(place / "model" / "model.safetensors", b"\2" + bytes(7) + b"{}")
    adapter = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(place / "base")}
    write(place / "adapter" / "adapter_config.json", json.dumps(adapter))
    write(place / "checkpoint" / "manifest.json", "{}")
    write(place / "deepspeed" / "latest", "global_step10")
    write(place / "deepspeed" / "global_step10" / "mp_rank_00_model_states.pt", b"PK")
    write(place / "dcp" / ".metadata", b"\x80")
    write(place / "trainer" / "trainer_state.json", "{}")


def save_data(place: Path) -> None:
    """Texts and samples, most of them with something wrong."""
    chat = {"messages": chat_of("What is 1+2?", "3.")}
    samples = {
        "one": [chat],
        "unknown": [{"a": 1, "b": 2}] * 4,
        "tokens": [{"input_ids": [1, 2], "labels": [1, 2]}] * 4,
        "pairs": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4,
        "norole": [{"messages": [{"content": "hi"}, {"content": "ho"}]}] * 4,
        "noanswer": [{"messages": [{"role": "user", "content": "hi"}]}] * 4,
        "chat": [chat] * 4,
        "both/b": [chat] * 2,
        "kinds/b": [chat] * 2,
    }
    for name, rows in samples.items():
        write(place / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(place / "text.txt", "To be, or not to be, that is the question. " * 200)
    write(place / "short.txt", "too short")
    write(place / "latin.txt", "un café ".encode("latin1") * 99)
    write(place / "latin.jsonl", '{"text": "café"}\n'.encode("latin1") * 4)
    write(place / "both" / "a.txt", "plain text\n" * 9)
    write(place / "kinds" / "a.csv", "prompt,completion\na,b\n")
    write(place / "headless.csv", "hi,ho\nhi,hey\n")
    write(place / "semicolon.csv", "prompt;completion\na;b\nc;d\n")


def save_rest(place: Path) -> None:
    """Files of options, a run, a timeline, and what is not to be overwritten."""
    for name in ("nvme", "empty"):
        (place / name).mkdir()
    write(place / "taken" / "notes.txt", "mine")
    write(place / "mine.svg", "<svg>mine</svg>")
    event = {"ph": "X", "cat": "step", "name": "1", "ts": 0, "dur": 1000}
    write(place / "t.json", f"[\n{json.dumps(event)}\n]")
    for kind in (run_files.STATUS, run_files.PLAN):
        run_files.write(place / "run", kind, 0, {"step": 1})
    options = {
        "list.json": "[1]",
        "stage7.json": '{"zero_optimization": {"stage": 7}}',
        "parms.toml": 'parms = "host"',
        "gpu.toml": 'params = "gpu"',
        "top.toml": "steps = 3",
        "typo.toml": "[train]\nstpes = 3",
        "switch.toml": "[train]\nresume = 'yes'",
        "nested.toml": "[train.model]\npath = 'base'",
        "hyphen.toml": 'host-memory = "8GiB"',
        "gigs.toml": 'host_memory = "8 gigs"',
    }
    for name, text in options.items():
        write(place / name, text)


def save_poor(place: Path) -> None:
    """What uses refer to that were answered poorly at first."""
    chat = {"messages": chat_of("What is 1+2?", "3.")}
    part = [{"type": "text", "text": "a"}]
    messages = {
        "dict": chat["messages"][0],
        "string": "hi",
        "nocontent": [{"role": "user"}, {"role": "assistant"}],
        "roles": [{"role": "narrator", "content": "a"}, {"role": "critic", "content": "b"}],
        "parts": [{"role": role, "content": part} for role in ("user", "assistant")],
    }
    rows = {name: [{"messages": given}] * 4 for name, given in messages.items()}
    rows["mixed"] = [chat, {"prompt": "a", "completion": "b"}, chat, chat]
    for name, given in rows.items():
        write(place / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in given))
    files = {
        "python.jsonl": f"{chat}\n{chat}\n",
        "latin.csv": "prompt,completion\ncafé,b\nx,y\n".encode("latin1"),
        "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(200),
        "book.pdf": b"%PDF-1.4\n%\xe2\xe3" + bytes(200),
        "utf16.txt": ("hello " * 300).encode("utf-16"),
        "chat.jsonl.gz": b"\x1f\x8b" + bytes(100),
        "tokens.npy": b"\x93NUMPY\1\0" + bytes(100),
        "empty.txt": "",
        "empty.json": "",
        "stage.json": '{"zero_optimization": 3}',
        "disk.json": '{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}',
        "windows.toml": 'params = "nvme"\nnvme_paths = ["C:\\nvme"]',
        "gguf/model.gguf": b"GGUF",
    }
    for name, content in files.items():
        write(place / name, content)
    models = {  # another content for one of the files; None: without it
        "lfs": ("model.safetensors", "version https://git-lfs.github.com/spec/v1\nsize 9\n"),
        "badtok": ("tokenizer.json", "{}"),
        "mute": ("tokenizer.json", None),
        "binonly": ("model.safetensors", None),
    }
    for name, (file, content) in models.items():
        shutil.copytree(place / "base", place / name)
        (place / name / file).unlink() if content is None else write(place / name / file, content)
    (place / "mute" / "tokenizer_config.json").unlink()
    write(place / "binonly" / "pytorch_model.bin", b"PK\3\4")


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What all uses refer to, and none changes."""
    folder = tmp_path_factory.mktemp("wrong") / "place"
    folder.mkdir()
    save_models(folder)
    save_data(folder)
    save_rest(folder)
    save_poor(folder)
    return folder


@pytest.fixture
def place(folder, monkeypatch) -> Path:
    """The current folder, on a machine without a network and without a GPU, as no rank of a job."""

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.chdir(folder)
    monkeypatch.setenv("INFINITY_CACHE", str(folder.parent / "cache"))
    for name in ("RANK", "WORLD_SIZE", "INFINITY_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return folder


def words_of(use: str) -> tuple[dict[str, str], list[str]]:
    """The variables and the arguments that a use stands for."""
    words = shlex.split(use)
    variables = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, [*shlex.split(SHORT.get(words[0], words[0])), *words[1:]] if words else []


def files_in(folder: Path) -> Iterable[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize("use", USES)
def test_a_wrong_use_is_answered_with_cause_and_remedy(use, place, capsys, monkeypatch):
    variables, argv = words_of(use)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = files_in(place)
    status = main(argv)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), (status, out, err)
    assert files_in(place) == before
    first, *rest = err.splitlines()
    command = " ".join(["infinity", *(word for word in argv[:1] if word in SUBCOMMANDS)])
    assert first.startswith(f"{command}: ") and len(rest) <= 1, err
    assert not any(line.startswith("infinity") for line in rest) and "Traceback" not in err
    for pattern in USES[use]:
        assert re.search(pattern, err, re.DOTALL), f"{pattern!r} is not in {err!r}"


def test_every_command_is_used_wrongly():
    used = {argv[0] for _, argv in map(words_of, USES) if argv}
    assert set(SUBCOMMANDS) <= used and len(USES) >= 110
