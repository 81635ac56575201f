"""A task for inspect_ai, and its run with a model that is none: what the model saw and scored, as JSON."""

from __future__ import annotations

import json
import sys

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec

import shoal
from shoal.integrations.inspect import ShoalConfig

MODEL = "mockllm/model"


def run(logs: str) -> dict[str, object]:
    call = ModelOutput.for_tool_call(MODEL, "bash", {"command": "expr $(cat number) + 1; hostname; id -un"})
    answer = ModelOutput.from_content(MODEL, "It is 42.")
    for output in (call, answer):
        output.usage = ModelUsage()  # else it counts tokens with a table that it fetches
    task = Task(
        dataset=[Sample(input="What comes after the number in the file?", target="42", files={"number": "41"})],
        solver=[use_tools(bash(timeout=30)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("shoal", ShoalConfig(profile="small")),
    )
    (log,) = inspect_ai.eval(task, model=get_model(MODEL, custom_outputs=[call, answer]), log_dir=logs, display="none")
    assert log.results is not None, log.error
    return {
        "status": log.status,
        "accuracy": log.results.scores[0].metrics["accuracy"].value,
        "observed": [message.text for sample in log.samples or () for message in sample.messages[2:3]],
        "left": [info.id for info in shoal.Sandbox.list()],
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
