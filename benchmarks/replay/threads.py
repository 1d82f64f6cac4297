# SPDX-License-Identifier: Apache-2.0
"""Logs that people put into the issues of public projects, with what their threads found.

A case is the log of an issue: `OWNER+REPO+NUMBER.json`, as GitHub's API gives it. A cause that says
what the thread found is right; a node that is accused where it found no hardware is an innocent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.replay.source import Score, Source
from slurm_health.records.script_records import Attribution
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import DataManager

_BLOCK = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
_LOST = re.compile(r"srun: error: Node failure on (\S+)")  # a node of the job, as Slurm says it
_OPEN = {None, "script-failed", "rank-failed"}
_KILLED, _ABORTED = 137, 134
_UNDECIDED = Attribution.UNDECIDED.value
_WAITED = frozenset({"ranks-waited", "never-entered", "collective-timed-out", "connections-broke"})

# The causes that say what was found, whether that was the node's hardware or its software, and how
# the process ended where that was not exit code 1.
Truth = tuple[frozenset[str], bool, int]

_TRUTH: Mapping[str, Truth] = {
    **{
        issue: (frozenset({"gpu-broken"}), True, 1)
        for issue in (
            "NVIDIA/semantic-segmentation#33",
            "jade-hpc-gpu/jade-hpc-gpu.github.io#194",
            "nagadit/DeepFaceLab_Linux#89",
        )
    },
    "huggingface/huggingface_hub#4134": (frozenset({"gpu-fabric"}), True, 1),
    "wilicc/gpu-burn#92": (frozenset({"gpu-fabric"}), True, _ABORTED),
    **{
        issue: (frozenset({"checkpoint-broken"}), False, 1)
        for issue in ("open-mmlab/mmagic#876", "BolinLai/GLC#4")
    },
    **{
        issue: (frozenset({"duplicate-gpu"}), False, 1)
        for issue in (
            "Peterande/D-FINE#289",
            "csguoh/MambaIR#39",
            "verl-project/verl#161",
            "NVIDIA/Megatron-LM#661",
            "horovod/horovod#3929",
        )
    },
    **{
        issue: (frozenset({"killed-for-memory"}), False, _KILLED)
        for issue in (
            "ArjunaCluster/ArjunaUsers#52",
            "chrisknewman/tusas#149",
            "hafs-community/HAFS#101",
            "brain-score/vision#950",
            "lanl/PyBNF#118",
        )
    },
    **{
        issue: (frozenset({"host-out-of-memory", "killed-for-memory"}), False, 1)
        for issue in ("hezhangsprinter/DCPDN#12", "gemcollector/RL-ViGen#17")
    },
    **{
        issue: (frozenset({"shared-memory-full"}), False, 1)
        for issue in (
            "pytorch/pytorch#16979",
            "clovaai/voxceleb_trainer#83",
            "msr-fiddle/pipedream#28",
            "hkchengrex/STCN#132",
        )
    },
    **{
        issue: (frozenset({"port-in-use"}), False, 1)
        for issue in (
            "meta-pytorch/torchtune#392",
            "pytorch/pytorch#126510",
            "modelscope/ms-swift#3988",
            "InternLM/lmdeploy#1925",
        )
    },
    "AkariAsai/self-rag#83": (frozenset({"killed", "killed-for-memory"}), False, 1),
    "opendatalab/MinerU#426": (frozenset({"launch-failure"}), True, 1),
    "BVLC/caffe#3377": (frozenset({"launch-failure", "crashed"}), True, _ABORTED),
    "ZettaAI/zetta_utils#671": (frozenset({"ended-from-outside"}), False, 143),
    "hkproj/pytorch-transformer-distributed#1": (_WAITED, False, 1),
    # The node had lost its copies of batch scripts, which was mended by a reboot.
    "ArjunaCluster/ArjunaUsers#46": (frozenset({"script-lost"}), True, 1),
    "ArjunaCluster/ArjunaUsers#21": (frozenset({"script-lost"}), True, 1),
    # The user's name of an interface that the nodes do not have.
    "NVIDIA/nccl#1837": (frozenset({"network-interface-missing"}), False, 1),
    # A node without any interface.
    "NVIDIA/nccl#210": (frozenset({"network-interface-missing"}), False, 1),
    "NVIDIA/nccl#1235": (frozenset({"gpu-out-of-memory"}), False, 1),
    "NVIDIA/nccl-tests#15": (frozenset({"connections-broke", "peer-unreachable"}), False, 1),
    "OdingdongO/pytorch_classification#1": (frozenset({"no-gpu"}), False, 1),
    # What CUDA and the driver did not agree on.
    "NVIDIA/nccl#1029": (frozenset({"no-gpu"}), False, 1),
    "ademakdogan/nails_segmentation#8": (frozenset({"gpu-not-supported"}), False, 1),
    **dict.fromkeys(
        (
            "XPixelGroup/BasicSR#737",
            "ai2cm/ace#348",
            "huggingface/picotron_tutorial#6",
            "huggingface/open-r1#620",
            "pytorch/pytorch#118369",
            "arrival-ltd/catalyst-rl-tutorial#15",
            "hiyouga/LlamaFactory#8261",
            "hiyouga/LlamaFactory#7396",
        ),
        (_WAITED, False, _ABORTED),
    ),
}


def score(directory: Path) -> Score:
    """Read each log as a job's output, and compare the cause with what its thread found."""
    return score_logs((issue, log, _TRUTH[issue]) for issue, log in _logs(directory))


def score_logs(cases: Iterable[tuple[str, str, Truth]]) -> Score:
    """Read logs as jobs' outputs, each with its name, and compare the causes with what is true."""
    score = Score()
    diagnostician = FailureDiagnostician()
    for name, log, (causes, of_node, status) in cases:
        end = ScriptEnd(exit_code=status, nodes=("n1", *_LOST.findall(log)))
        diagnosed = diagnostician.diagnose(
            data_manager=DataManager([end, read_output([("out", log)])])
        ).diagnosed
        cause = diagnosed.cause if diagnosed else None
        score.innocent += bool(diagnosed and diagnosed.accused and not of_node)
        score.right += cause in causes
        is_open = diagnosed is None or cause in _OPEN or diagnosed.attribution == _UNDECIDED
        score.undecided += cause not in causes and is_open
        score.wrong += cause not in causes and not is_open
        if cause not in causes:
            score.missed.append(f"{name}: {cause}, truth {' or '.join(sorted(causes))}")
    return score


def _logs(directory: Path) -> Iterator[tuple[str, str]]:
    for issue in _TRUTH:
        path = directory / f"{issue.replace('/', '+').replace('#', '+')}.json"
        if path.exists():
            body = str(json.loads(path.read_text())["body"])
            yield issue, "\n".join(_BLOCK.findall(body)) or body


SOURCES = (
    Source(
        name="threads",
        place="threads",
        anchor="all, by their threads",
        seen=False,
        score=score,
    ),
)
