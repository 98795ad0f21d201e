"""The process of one environment. It runs as a script in the Python environment of the library, without this package.

The run writes requests to standard input, one JSON object per line, and reads the answers from standard output:

    {"id": 1, "method": "tasks", "limit": 100, "split": null}
                                                        -> {"id": 1, "result": [{"prompt", "label", "task"}, ...]}
    {"id": 2, "method": "run", "task": {}, "url": "…"}  -> {"id": 2, "result": {"reward": 1.0, "metrics": {}}}
    {"id": 3, "method": "cancel", "run": 2}             -> no answer, and none to request 2

If each step of a task is a segment of its trajectory, the result also has `steps`: `reward` and `state` of each step.
Steps with equal states began with the same observation.

A failed request is answered with `{"id", "error": {"fault", "message"}}`. `fault` is `model` if a request to the model
failed, `task` if the code of the environment raised, and `environment` for everything else. The process ends with its
standard input. What an environment prints goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import importlib
import json
import logging
import math
import os
import secrets
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from threading import Semaphore
from typing import Any, Protocol

KEY_VARIABLE = "MILES_AGENT_API_KEY"
"""Environment variable with the API key of the endpoint. verifiers hides such names from programs of the model."""
KEY_HEADERS = ("Authorization", "x-api-key")
"""Headers with the API key: those of OpenAI's and of Anthropic's clients."""
MODEL = "policy"
"""Name of the trained model at the endpoint."""
MAX_LINE_BYTES = 1 << 26


class ModelRequestError(Exception):
    """A request to the model failed: the environment itself is intact."""


class RefusedRequestError(ModelRequestError):
    """The endpoint refused a request, for example because its prompt is too long; the session goes on."""


class TaskFailedError(Exception):
    """The code of the environment raised, for example its reward: another attempt may well fail in the same way."""


class InvalidActionError(Exception):
    """The model wrote an action that the environment does not have."""


class Environment(Protocol):
    def __init__(self, name: str, settings: dict[str, Any]) -> None: ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Hold what tasks need; the other methods are called inside."""
        ...

    async def tasks(self, limit: int, split: str | None) -> list[dict[str, Any]]:
        """The first `limit` tasks: `prompt` identifies one, `label` is its answer or None, `task` is for `run`.

        `split` is None unless the library has `splits`."""
        ...

    async def run(self, task: dict[str, Any], url: str) -> dict[str, Any]:
        """Let the model at the OpenAI base URL `url` do a task, and return `reward`, `metrics` and, if each step is a
        segment, `steps`."""
        ...


def module_of(name: str) -> str:
    """The module name of an installed package, or of a Python file, whose folder is then searched for modules."""
    if not name.endswith(".py"):
        return name
    path = Path(name).resolve()
    if not path.is_file():
        raise ModuleNotFoundError(f"the file {name} does not exist")
    sys.path.insert(0, str(path.parent))
    return path.stem


class Verifiers:
    """An environment of `verifiers`. `name` is a taskset; `settings` is the `[env]` block of its configuration."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        import verifiers.v1 as vf

        sys.path.append(str(Path(__file__).parent / "harness"))
        taskset = {**settings.get("taskset", {}), "id": module_of(name)}
        settings = {**settings, "taskset": taskset}
        plain = vf.environment_class(taskset["id"], settings.get("id", "")) is vf.SingleAgentEnv
        if plain and "agent" not in settings and vf.default_harness_id(taskset["id"]) == "bash":
            # The default of the library is an agent with a shell, in a sandbox that Prime Intellect rents out.
            settings["agent"] = {"harness": {"id": "miles_chat"}, "runtime": {"type": "subprocess"}}
        self._vf = vf
        self.env = vf.load_environment(vf.resolve_env_config(settings))
        self._urls: dict[str, str] = {}
        """Base URLs of the model by trace: verifiers keeps one client for ever per address, so all share the relay."""
        self._relay = ""

    async def tasks(self, limit: int, split: str | None) -> list[dict[str, Any]]:
        return [
            {
                "prompt": task.data.prompt_text or task.data.name or task.key,
                "label": task.data.model_dump(mode="json").get("answer"),
                "task": task.data.model_dump(mode="json", exclude_defaults=True),
            }
            for task in islice(self.env.taskset, limit)
        ]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        from aiohttp import ClientSession, ClientTimeout, web

        async with ClientSession(timeout=ClientTimeout(total=None)) as http:

            async def forward(request: web.Request) -> web.Response:
                url = self._urls.get(request.headers.get("X-Session-ID", ""))
                if url is None:
                    return web.json_response({"error": "only model requests of a running task are relayed"}, status=404)
                headers = {name: key for name in KEY_HEADERS if (key := request.headers.get(name)) is not None}
                target = f"{url}/{request.match_info['path']}"
                async with http.post(target, data=await request.read(), headers=headers) as answer:
                    return web.Response(
                        body=await answer.read(), status=answer.status, content_type=answer.content_type
                    )

            app = web.Application(client_max_size=MAX_LINE_BYTES)
            app.router.add_post("/v1/{path:.*}", forward)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._relay = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            try:
                async with self.env.serving():
                    yield
            finally:
                await runner.cleanup()

    async def run(self, task: dict[str, Any], url: str) -> dict[str, Any]:
        vf, traces = self._vf, set[str]()
        taskset = self.env.taskset
        task_class = type(taskset).task_type()
        data = task_class.data_type().model_validate(task)
        [slot] = self.env.slots(task_class(data, taskset.config.task))
        client = vf.EvalClientConfig(base_url=self._relay, api_key_var=KEY_VARIABLE)

        def register(trace: Any) -> None:
            traces.add(trace.id)
            self._urls[trace.id] = url

        try:
            episode = await self.env.run_slot(slot, vf.ModelContext(model=MODEL, client=client), on_trace=register)
        finally:
            for trace in traces:
                self._urls.pop(trace, None)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            kind = {"ProviderError": ModelRequestError, "TaskError": TaskFailedError, "EnvError": TaskFailedError}
            raise kind.get(errors[-1].type, RuntimeError)(f"{errors[-1].type}: {errors[-1].message}")
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        metrics: dict[str, float] = {}
        for trace in trained:
            metrics |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
            metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": sum(trace.reward for trace in trained), "metrics": metrics}


class BelowKey:
    """An ASGI application that is served below the path `/key`. It answers all other requests with 404.

    The client of openenv sends no other headers, but it keeps the path of its base URL. Without the key, every
    user and program of the machine, and every page in a browser, could act in the environment.
    """

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._prefix = f"/{key}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path, length = scope["path"].encode(), len(self._prefix)
        if hmac.compare_digest(path[:length], self._prefix):
            below = {"path": path[length:].decode() or "/", "raw_path": scope["raw_path"][length:] or b"/"}
            await self._app({**scope, **below}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


class OpenEnv:
    """An environment of `openenv`: the URL of a server, or a Python file or module whose `app` is served here.

    Each answer of the model is one action, and the observation that follows is the next message of the user. The reward
    is the sum over all steps.
    """

    SETTINGS: Mapping[str, Any] = {"split": "train", "max_turns": 16, "action_field": None, "observation_field": None}
    """`split` of the environment's tasks, the most steps per task, the field of an action that receives the answer of
    the model, and the field of an observation that becomes the message. Without `action_field`, an answer that is not a
    JSON object goes to the only required field of the action; without `observation_field`, the message is the
    observation as JSON."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._settings = with_defaults(settings, self.SETTINGS)
        remote = name.startswith(("http://", "https://"))
        self._url = name.rstrip("/") if remote else ""
        self._app: Any = None if remote else importlib.import_module(module_of(name)).app
        self.required: list[str] = []
        """The required fields of an action."""
        self._model: Any = None

    async def tasks(self, limit: int, split: str | None) -> list[dict[str, Any]]:
        """Return the tasks of the task API of the environment; one task per seed if it has none."""
        import httpx

        split = self._settings["split"]
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
            [name] = (await http.get("/list_environments")).json()
            request = {"split": split, "start": 0, "stop": limit}
            answer = await http.post(f"/{name}/task_range", json=request)
        if answer.status_code in (404, 501):
            return [{"prompt": f"seed {seed}", "label": None, "task": {"seed": seed}} for seed in range(limit)]
        answer.raise_for_status()
        return [
            {
                "prompt": str(task.get("prompt", f"{split} {index}")),
                "label": task.get("answer"),
                "task": {"split": split, "index": index},
            }
            for index, task in enumerate(answer.json()["tasks"])
        ]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        import uvicorn

        key = secrets.token_urlsafe(32)
        # The access log would contain the key.
        config = uvicorn.Config(BelowKey(self._app, key), log_level="warning", access_log=False)
        server, serving = uvicorn.Server(config), None
        if self._app is not None:
            # Requests wait in the queue of the socket until the server has started.
            listener = socket.create_server(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{listener.getsockname()[1]}/{key}"
            serving = asyncio.create_task(server.serve([listener]))
        try:
            async with model_client() as self._model:
                schema = (await self._model.get(f"{self._url}/schema")).raise_for_status().json()
                self.required = schema["action"].get("required", [])
                yield
        finally:
            if serving is not None:
                server.should_exit = True
                await serving

    async def run(self, task: dict[str, Any], url: str) -> dict[str, Any]:
        from openenv import GenericEnvClient

        messages: list[dict[str, Any]] = []
        reward, invalid = 0.0, False
        async with GenericEnvClient(base_url=self._url) as env:
            result = await self._call(env.reset, **task)
            while not result.done and len(messages) < 2 * self._settings["max_turns"]:
                messages.append({"role": "user", "content": self.text_of(result.observation)})
                answer, complete = await self._ask(url, messages)
                messages.append(answer)
                action = self.action_of(answer.get("content") or "")
                invalid = action is None
                if action is None:
                    break
                try:
                    result = await self._call(env.step, action)
                except InvalidActionError:
                    invalid = True
                    break
                reward += result.reward or 0.0
                if not complete:
                    break
        return {"reward": reward, "metrics": {"turns": len(messages) // 2, "invalid_action": float(invalid)}}

    async def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of the client, and sort the errors that the server reports by their code."""
        try:
            return await method(*arguments, **named)
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise InvalidActionError(str(error)) from error
            if "EXECUTION_ERROR" in str(error):
                raise TaskFailedError(str(error)) from error
            raise

    def text_of(self, observation: dict[str, Any]) -> str:
        field = self._settings["observation_field"]
        return json.dumps(observation, ensure_ascii=False) if field is None else str(observation[field])

    def action_of(self, text: str) -> dict[str, Any] | None:
        """The action that an answer of the model stands for; None if it stands for none."""
        field = self._settings["action_field"]
        if field is not None:
            return {field: text}
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        if isinstance(action, dict):
            return action
        return {self.required[0]: text} if len(self.required) == 1 else None

    async def _ask(self, url: str, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Return the answer of the model, and whether it is complete."""
        [choice] = (await completion(self._model, url, messages))["choices"]
        return choice["message"], choice["finish_reason"] != "length"


@dataclass
class RollStep:
    """A step in an environment of ROLL."""

    observation: Any
    """What the environment showed before the step: a text, or chat messages."""
    info: Mapping[str, Any]
    """What the environment said beside it."""
    state: str = ""
    """Equal for steps with the same observation."""
    action: str = ""
    reward: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Roll:
    """Environments that are registered with `gem`, as ROLL's are. NAME is the module or file that registers them.

    A split is a tag of the settings, and a task is a seed. Conversations are those of the class in ROLL (at 8eb27cc2)
    that `env_manager_cls` of the tag names. With `TrajEnvManager`, the default, it is the system template, what the
    environment says about itself, and each observation in the template of the tag. With the classes in `BY_STEP`, each
    step is a conversation, and so a segment of the trajectory. The reward is the sum over all steps.
    """

    SETTINGS: Mapping[str, Any] = {"tags": {}, "max_new_tokens": None}
    """`tags` are entries of ROLL's `custom_envs` by name. `max_new_tokens` limits each answer, in addition to
    `max_tokens_per_step` of the tag."""
    KEYS = ("env_type", "max_steps", "max_tokens_per_step", "agent_system_template", "agent_template")
    """What each tag has."""
    NATIVE = "AgentNativeStepEnvManager"
    """The class for environments whose observations are chat messages."""
    BY_STEP = ("StepEnvManager", "StepConcatEnvManager", NATIVE)
    """Classes with which each step of a trajectory is a sample."""
    MANAGERS = ("TrajEnvManager", *BY_STEP)
    MAX_STEPS = 128
    """Limit for the steps of a trajectory with these classes: its segments at the endpoint."""
    MODES: Mapping[Any, Any] = {"sum": sum, "min": min, "max": max, "first": itemgetter(0), "last": itemgetter(-1)}
    """What becomes of the values of a metric that its `metrics_agg_mode` names; else their mean."""
    MAX_THREADS = 256

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        import gem

        self._gem = gem
        importlib.import_module(module_of(name))
        # ROLL lets every logger of the process write messages of level INFO.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        settings = with_defaults(settings, self.SETTINGS)
        self._tags: dict[str, dict[str, Any]] = settings["tags"]
        self._max_new_tokens = settings["max_new_tokens"]
        self._idle: dict[str, list[Any]] = defaultdict(list)
        """Environments that no task uses, by tag. Some read a whole data set when they are created."""
        self._threads = ThreadPoolExecutor(self.MAX_THREADS)
        one_at_a_time = Semaphore()
        self._slots = {
            tag: one_at_a_time
            if of_tag.get("use_thread_lock")
            else Semaphore(of_tag.get("max_env_step_concurrent") or self.MAX_THREADS)
            for tag, of_tag in self._tags.items()
        }
        """By tag. A call into an environment holds its slot to the end, even if the task of the call is cancelled."""
        self._model: Any = None
        for tag, of_tag in self._tags.items():
            if missing := set(self.KEYS) - of_tag.keys():
                raise ValueError(f"tags.{tag} has no {', '.join(sorted(missing))}")
            if (manager := self.manager_of(of_tag)) not in self.MANAGERS:
                known = ", ".join(self.MANAGERS)
                raise ValueError(f"env_manager_cls of tags.{tag} is {manager}: set it to one of {known}")
            if manager in self.BY_STEP and of_tag["max_steps"] > self.MAX_STEPS:
                raise ValueError(
                    f"max_steps of tags.{tag} is {of_tag['max_steps']}: set it to {self.MAX_STEPS} or less"
                )
            try:
                self._prompt(of_tag, [RollStep("", {})])
            except KeyError as error:
                raise ValueError(f"agent_template of tags.{tag} has a field that is unknown: {error}") from error

    async def tasks(self, limit: int, split: str | None) -> list[dict[str, Any]]:
        """Return one task per seed, from 0 on."""
        if split not in self._tags:
            raise ValueError(f"there is no tag {split}: set prompt_data to environment:TAG with one of `tags`")
        self._idle[split].append(await self._in_thread(split, partial(self._made, split, 0)))
        return [
            {"prompt": f"{split} {seed}", "label": None, "task": {"tag": split, "seed": seed}} for seed in range(limit)
        ]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with model_client() as self._model:
            yield

    async def run(self, task: dict[str, Any], url: str) -> dict[str, Any]:
        tag = task["tag"]
        of_tag, idle = self._tags[tag], self._idle[tag]
        # As in ROLL, a `seed` of the configuration stands for that of the task: another task needs another environment.
        fixed = "seed" not in (of_tag.get("env_config") or {})
        reused = bool(idle) and fixed
        env = idle.pop() if reused else await self._in_thread(tag, partial(self._made, tag, task["seed"]))
        observation, info = await self._call(tag, env.reset, seed=task["seed"])
        manager = self.manager_of(of_tag)
        native = manager == self.NATIVE
        if native and env.env_reset_failed:
            await self._call(tag, env.close)
            raise RuntimeError(f"{tag} could not be reset: {info.get('failure_mode') or 'it gives no reason'}")
        if observation is None:
            raise TaskFailedError(f"{tag} has no task for seed {task['seed']}")
        steps, terminated, info = await self._play(tag, env, RollStep(observation, info), url)
        reward = sum(step.reward for step in steps)
        if native and not terminated:
            from roll.utils.constants import EpisodeStopReason

            # The environment computes its reward and releases its sandbox.
            _, gained, *_ = await self._call(tag, env.step, EpisodeStopReason.MAX_LENGTH)
            reward += float(gained)
        if fixed:
            idle.append(env)
        metrics = defaultdict[str, list[float]](list)
        for name, value in (entry for step in steps for entry in step.metrics.items()):
            metrics[name].append(float(value))
        modes = info.get("metrics_agg_mode", {})
        summary = {name: self.MODES.get(modes.get(name), fmean)(values) for name, values in metrics.items()}
        result: dict[str, Any] = {"reward": reward, "metrics": {**summary, "num_actions": len(steps)}}
        if manager in self.BY_STEP:
            result["steps"] = [{"reward": step.reward, "state": step.state} for step in steps]
        return result

    async def _play(
        self, tag: str, env: Any, step: RollStep, url: str
    ) -> tuple[list[RollStep], bool, Mapping[str, Any]]:
        """Let the model act until the trajectory ends.

        Returns the steps, whether the environment has terminated, and what it said last. `step` is the first one.
        """
        of_tag, manager = self._tags[tag], self.manager_of(self._tags[tag])
        by_step = manager in self.BY_STEP
        limit = min(filter(None, (of_tag["max_tokens_per_step"], self._max_new_tokens)))
        # As in ROLL, an environment whose observations are messages counts its steps itself.
        most = math.inf if manager == self.NATIVE else of_tag["max_steps"]
        fields: dict[str, Any] = {"max_tokens": limit}
        if manager == self.NATIVE and (tools := step.info.get("tools")):
            fields["tools"] = tools
        messages: list[dict[str, Any]] = []
        steps: list[RollStep] = []
        terminated = False
        # As in ROLL, an environment that only truncates goes on.
        while not terminated and len(steps) < most:
            messages = ([] if by_step else messages) + self._prompt(of_tag, [*steps, step])
            if by_step:
                # No template reads this variable. A request with another value opens a segment.
                fields["chat_template_kwargs"] = {"roll_step": len(steps)}
            try:
                response = await completion(self._model, url, messages, **fields)
            except RefusedRequestError:
                if not by_step or not steps:
                    raise
                break  # as in ROLL, a prompt that is too long ends the trajectory
            [choice], sampled = response["choices"], response["usage"]["completion_tokens"]
            if not sampled:  # the trajectory is as long as it may be
                break
            messages.append(choice["message"])
            action = (choice["message"].get("content") or "") + (choice["matched_stop"] or "")
            observation, gained, terminated, _, info = await self._call(tag, env.step, action)
            step.reward, step.metrics = float(gained), info.get("metrics", {})
            step.action = info.get("action_content", action)
            steps.append(step)
            step = RollStep(observation, info)
            if not by_step and choice["finish_reason"] == "length" and sampled < limit:
                break
        return steps, terminated, step.info

    @staticmethod
    def manager_of(of_tag: Mapping[str, Any]) -> str:
        """The name of the class in ROLL that runs the environments of a tag."""
        return str(of_tag.get("env_manager_cls", "TrajEnvManager")).rpartition(".")[2]

    def _prompt(self, of_tag: Mapping[str, Any], steps: Sequence[RollStep]) -> list[dict[str, Any]]:
        """Set the state of the last step, and return the messages that precede its answer: all with `BY_STEP`, else
        those that follow the answer before."""
        *_, step = steps
        manager = self.manager_of(of_tag)
        state = step.observation
        if manager == self.NATIVE:
            messages = list(step.observation)
        elif manager == "TrajEnvManager":
            messages = self._next_messages(of_tag, steps)
        else:
            if manager == "StepConcatEnvManager":
                state = f"{step.observation}\n{step.info.get('suffix', '')}"
            messages = self._all_messages(of_tag, steps, state)
        step.state = hashlib.sha256(json.dumps(state, default=str).encode()).hexdigest()
        return messages

    def _all_messages(self, of_tag: Mapping[str, Any], steps: Sequence[RollStep], shown: str) -> list[dict[str, Any]]:
        """A prompt with earlier steps, at most `history_length` - 1 of them."""
        earlier = steps[-of_tag["history_length"] : -1] if "history_length" in of_tag else ()
        if self.manager_of(of_tag) == "StepConcatEnvManager":
            content = of_tag["agent_template"].format(
                history="\n".join(one.observation for one in earlier), current_observation=shown
            )
        else:
            # As in ROLL, the history consists of the steps whose action was not valid.
            invalid = [
                f"(step: {number}, observation: {one.observation}, action: {one.action} (not valid, keep to the format "
                f"of the instructions), reward: {one.reward})"
                for number, one in enumerate(earlier, start=len(steps) - len(earlier))
                if not one.metrics.get("action_is_valid", True)
            ]
            content = of_tag["agent_template"].format(
                env_instruction=steps[0].info.get("env_instruction", ""),
                history=", ".join(invalid),
                history_length=len(earlier),
                step_count=len(steps) - 1,
                current_step=len(steps),
                current_observation=shown,
                max_response_length=of_tag["max_tokens_per_step"],
            )
        return [*self._system(of_tag), {"role": "user", "content": content}]

    def _next_messages(self, of_tag: Mapping[str, Any], steps: Sequence[RollStep]) -> list[dict[str, Any]]:
        """What the model gets to see of the last observation."""
        *earlier, step = steps
        if earlier and step.info.get("use_tool"):
            return [{"role": "tool", "content": step.observation}]
        content = of_tag["agent_template"].format(
            observation=step.observation,
            turn_idx=len(steps),
            suffix=step.info.get("suffix", ""),
            actions_left=of_tag["max_steps"] - len(earlier),
            max_response_length=of_tag["max_tokens_per_step"],
        )
        if earlier:
            return [{"role": "user", "content": content}]
        instruction = f"{step.info['env_instruction']}\n" if "env_instruction" in step.info else ""
        return [*self._system(of_tag), {"role": "user", "content": instruction + content}]

    @staticmethod
    def _system(of_tag: Mapping[str, Any]) -> list[dict[str, Any]]:
        template = of_tag["agent_system_template"]
        return [] if template is None else [{"role": "system", "content": template}]

    def _made(self, tag: str, seed: int) -> Any:
        of_tag = self._tags[tag]
        config = with_numbers(of_tag.get("env_config") or {})
        if "seed" in config:
            config["seed"] = seed
        env = self._gem.make(of_tag["env_type"], **config)
        if (tools := of_tag.get("tool_wrapper")) is None:
            return env
        from roll.pipeline.agentic.tools.tool_env_wrapper import tool_wrapper

        return tool_wrapper(env, wrapper_args=tools["wrapper_args"], tool_configs=tools["tool_configs"])

    async def _call(self, tag: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return await self._in_thread(tag, partial(method, *arguments, **named))
        except Exception as error:
            raise TaskFailedError(f"{type(error).__name__}: {error}") from error

    async def _in_thread(self, tag: str, function: Callable[[], Any]) -> Any:
        def holding_slot() -> Any:
            with self._slots[tag]:
                return function()

        return await asyncio.get_running_loop().run_in_executor(self._threads, holding_slot)


def with_numbers(value: Any) -> Any:
    """The value with whole numbers as the keys that JSON has made texts."""
    if isinstance(value, list):
        return [with_numbers(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isdecimal() else key: with_numbers(one) for key, one in value.items()}


def with_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an environment. Raises ValueError if one is unknown."""
    if unknown := settings.keys() - defaults.keys():
        raise ValueError(f"unknown settings {', '.join(sorted(unknown))}: set {', '.join(defaults)}")
    return {**defaults, **settings}


def model_client() -> Any:
    """A client for requests to the model."""
    import httpx

    # The endpoint of the run uses plain HTTP on this machine, and loading certificates takes time.
    return httpx.AsyncClient(verify=False, trust_env=False, timeout=None)


async def completion(client: Any, url: str, messages: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    """The response of the model to the messages. `others` are further fields of the request.

    Raises RefusedRequestError if the endpoint refuses the request, and ModelRequestError if the request fails.
    """
    import httpx

    try:
        response = await client.post(
            f"{url}/chat/completions",
            json={"model": MODEL, "messages": messages, **others},
            headers={"Authorization": f"Bearer {os.environ[KEY_VARIABLE]}"},
        )
    except httpx.HTTPError as error:
        raise ModelRequestError(f"{type(error).__name__}: {error}") from error
    if response.is_error:
        kind = RefusedRequestError if response.status_code == 400 else ModelRequestError
        raise kind(f"{response.status_code}: {response.text}")
    answered: dict[str, Any] = response.json()
    return answered


FAULTS: Mapping[type[BaseException], str] = {
    ModelRequestError: "model",
    RefusedRequestError: "model",
    TaskFailedError: "task",
    InvalidActionError: "task",
}
LIBRARIES: Mapping[str, type[Environment]] = {"verifiers": Verifiers, "openenv": OpenEnv, "roll": Roll}


async def serve(environment: Environment, lines: asyncio.StreamReader, write: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until the input ends."""
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(request: dict[str, Any]) -> None:
        number = request["id"]
        try:
            if request["method"] == "tasks":
                result: Any = await environment.tasks(request["limit"], request["split"])
            else:
                result = await environment.run(request["task"], request["url"])
            write({"id": number, "result": result})
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # An environment is code of the user, which may raise anything, also the CancelledError of a task of its
            # own. Only the run cancels this task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            fault = FAULTS.get(type(error), "environment")
            write({"id": number, "error": {"fault": fault, "message": str(error) or type(error).__name__}})

    while line := await lines.readline():
        request = json.loads(line)
        if request["method"] == "cancel":
            if (task := running.get(request["run"])) is not None:
                task.cancel()
        elif request["method"] == "tasks":
            # The input may end with this request.
            await answer(request)
        else:
            task = running[request["id"]] = asyncio.create_task(answer(request))
            task.add_done_callback(partial(_forget, running, request["id"]))
    for task in list(running.values()):
        task.cancel()


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del running[number]


async def main(library: str, name: str) -> None:
    # Answers keep the original standard output; what the environment prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        start = json.loads(await lines.readline())
        # The libraries read the key from a variable, which only this process and its children have.
        os.environ[KEY_VARIABLE] = start["key"]
        environment = LIBRARIES[library](name, start["settings"])
        async with environment.serving():
            write({"id": 0, "result": "ready"})
            await serve(environment, lines, write)
    except (Exception, SystemExit) as error:
        # ROLL's environments are registered with gem.
        missing = isinstance(error, ModuleNotFoundError) and error.name in (library, *["gem"] * (library == "roll"))
        kind = "missing" if missing else "environment"
        write({"id": 0, "error": {"fault": kind, "message": f"{type(error).__name__}: {error}"}})
        raise


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("library", choices=LIBRARIES)
    arguments.add_argument("name")
    asyncio.run(main(**vars(arguments.parse_args())))
