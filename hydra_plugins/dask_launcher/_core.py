"""The driver's side: which job runs on which host, and what becomes of it.

Dask knows the hosts, carries the jobs there and notices when a host is gone. Here is the rest: at most one job per host
is in Dask's hands, chosen when the host is free, so nothing ever waits behind a dead or a slow host. Everything happens
in one event loop, in a thread of its own; the calling thread waits, and gets the Ctrl-C.

A job is waiting, or at a host, or has its JobReturn. It goes back to waiting when its host vanishes, when the scheduler
is lost, when the host is unfit, and (`retries` times) when its process died. An attempt that the driver has given up
may still be alive where the driver cannot see it: that a key is FINISHED only once is pipeline.tracking's work.
"""

import asyncio
import concurrent.futures
import fcntl
import io
import itertools
import json
import logging
import os
import signal
import tarfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client, Future
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.cluster import joined
from pipeline.cluster.reach import why_no_scheduler
from pipeline.errors import BadInput

from . import _host

LONGEST_POLL_S = 60.0  # a host that is lost is noticed when the scheduler is asked
CONNECT_S = 5.0  # for a scheduler to answer at the start
FIRST_HOST_S = 20.0  # at the start: workers come back within 15 s after a restart of the scheduler
SLOW_HOST_S = 30.0  # what a host may take longer than another to have models and data, before the jobs start
SILENCE_S = 30.0  # a scheduler that does not answer for so long is lost
STOP_S = 12.0  # for interrupted jobs: their last words, and the way of the answer
DESCRIBE_S = 120.0  # for a host to start a process and say what it is; asked LOOKS times
LOOKS = 2
PREFETCH_TOLD_S = 60.0
MOST_LOSSES = 10  # a job whose host vanishes each time may be what takes the host down

cloudpickle.register_pickle_by_value(_host)
for _name in list(logging.root.manager.loggerDict):
    if _name.partition(".")[0] == "distributed":  # what matters of it we say ourselves; its modules have own levels
        logging.getLogger(_name).setLevel(logging.CRITICAL)


class JobFailed(RuntimeError):
    """A job that raised, or whose process died too often; the message has the traceback and the end of the log.

    reason: the same in a line.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(eq=False)
class _Job:
    index: int
    overrides: list[str]
    cfg: DictConfig
    name: str
    payload: bytes
    folder: str | None = None  # relative to the project of whichever host
    memory: int = 0  # bytes that it needs
    deaths: int = 0
    attempt: str | None = None  # the MLflow run of the last attempt that died with one
    losses: int = 0
    died_at: set[str] = field(default_factory=set)
    returned: JobReturn | None = None


@dataclass(eq=False)
class _Host:
    address: str  # of its worker: another one after each start of the worker
    name: str
    about: dict[str, Any] | None = None  # what it says of itself
    refused: str | None = None  # why it gets no jobs
    ready: bool = False
    job: _Job | None = None
    key: str = ""  # of the Dask task of that job
    work: asyncio.Task[None] | None = None  # being checked, or a job

    @property
    def memory(self) -> float:
        return (self.about or {}).get("memory_bytes", float("inf"))


class _SchedulerLost(Exception):
    pass


class _ByValue:
    """A function of _host that arrives as its code, whatever the host has on its disk or imported long ago."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._pickled = cloudpickle.dumps(function)

    def __call__(self, *args: Any) -> Any:
        return cloudpickle.loads(self._pickled)(*args)

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (self._pickled,)


# -- for the launcher -------------------------------------------------------------------------------------------------


def preflight(options: Mapping[str, Any], outputs: str, wanted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """See DaskLauncher.preflight; returns address -> description of the hosts found fit by now."""
    driver = _Driver(options, outputs, [], _distinct(wanted))
    _in_a_thread(driver.survey)
    fit = [host for host in driver.hosts.values() if host.ready]
    smallest, largest = min(int(each["memory"]) for each in wanted), max(host.memory for host in fit)
    if smallest > largest:
        raise BadInput(
            f"expected a host that can hold some job, but the smallest needs {_gib(smallest)} and the largest host has "
            f"{_gib(largest)}; choose a smaller model, a shorter prompt or generate.batch_size=1, or join a larger host"
        )
    return {host.address: host.about for host in fit}


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
    """Run the jobs on the hosts; their returns in the order of job_overrides."""
    setup_globals()
    configure_log(launcher.config.hydra.hydra_logging, launcher.config.hydra.verbose)
    Path(str(launcher.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    jobs = [_composed(launcher, list(one), initial_job_idx + i) for i, one in enumerate(job_overrides)]
    wanted = [{"model": _plain(job.cfg.model), "task": _plain(job.cfg.task)} for job in jobs if "sweep" in job.cfg]
    outputs = next((str(job.cfg.outputs) for job in jobs if "sweep" in job.cfg), "outputs")
    driver = _Driver(launcher.options, outputs, jobs, _distinct(wanted), launcher.checked)
    _in_a_thread(driver.run)
    return [job.returned for job in jobs if job.returned is not None]


def _composed(launcher: Any, overrides: list[str], number: int) -> _Job:
    cfg = launcher.hydra_context.config_loader.load_sweep_config(launcher.config, overrides)
    with open_dict(cfg):
        cfg.hydra.job.id, cfg.hydra.job.num = f"{cfg.hydra.job.name}_{number}", number
    parts = (launcher.hydra_context, cfg, launcher.task_function, Singleton.get_state())
    try:
        payload = cloudpickle.dumps(parts)
    except Exception as error:  # pickling runs code of whatever it meets
        raise BadInput(
            f"expected jobs that can be sent to another machine, got one that cannot be pickled ({error}): "
            f"{' '.join(overrides)}; use plain values and functions, or hydra/launcher=basic"
        ) from error
    job = _Job(number, overrides, cfg, " ".join(filter_overrides(overrides)) or f"#{number}", payload)
    if "sweep" in cfg:
        from pipeline.run import job_name

        job.name, job.memory = job_name(cfg), int(cfg.sweep.get("memory") or 0)
        job.folder = str(Path(cfg.outputs) / "jobs" / cfg.sweep.job)
    return job


def _plain(cfg: Any) -> Any:
    return OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg


def _distinct(wanted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    pairs = (json.dumps({name: each[name] for name in ("model", "task")}, sort_keys=True) for each in wanted)
    return [json.loads(pair) for pair in dict.fromkeys(pairs)]


def _in_a_thread(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` in an event loop of another thread. A KeyboardInterrupt here cancels it there and waits for its end;
    a second one does not wait.
    """
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
    started: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        await work()

    def thread() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=thread, name="dask launcher", daemon=True).start()
    try:
        outcome.result()
    except KeyboardInterrupt:
        print("interrupting the jobs ...", flush=True)
        started.result()()
        with suppress(asyncio.CancelledError, concurrent.futures.CancelledError):
            outcome.result()
        raise


# -- the driver -------------------------------------------------------------------------------------------------------


class _Driver:
    def __init__(
        self,
        options: Mapping[str, Any],
        outputs: str,
        jobs: Sequence[_Job],
        wanted: Sequence[Mapping[str, Any]],
        checked: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.retries, self.poll_s = int(options["retries"]), float(options["poll_s"])
        self.wait_for_hosts_s = float(options["wait_for_hosts_s"])
        for name, value in (("retries", self.retries), ("wait_for_hosts_s", self.wait_for_hosts_s)):
            if not value >= 0:  # nan neither
                raise BadInput(f"hydra.launcher.{name}: expected a number of at least 0, got {value!r}.")
        if not 0 < self.poll_s <= LONGEST_POLL_S:
            raise BadInput(
                f"hydra.launcher.poll_s: expected seconds, more than 0 and at most {LONGEST_POLL_S:.0f}, "
                f"got {self.poll_s!r}."
            )
        self.cluster = joined(Path(outputs), options["head"])
        self.outputs, self.wanted, self.checked = outputs, list(wanted), dict(checked or {})
        self.jobs, self.waiting = list(jobs), list(jobs)
        self.hosts: dict[str, _Host] = {}  # by address
        self.unfit: dict[str, str] = {}  # name of a host -> why it gets no more jobs of this sweep
        self.equipped: set[str] = set()  # names of hosts that have models and data
        self.largest: float = 0  # memory of a host seen so far
        self.own: asyncio.Task[tuple[dict[str, Any], dict[str, Any]]] | None = None
        self.finishing: set[asyncio.Task[None]] = set()  # jobs that came back and are put away
        self.stop: BaseException | None = None  # a job ended the sweep
        self.broken = False  # Dask dropped our tasks
        self.id, self.attempts = uuid.uuid4().hex[:8], itertools.count()
        self.started = self.able_since = time.monotonic()
        self.seconds: list[float] = []  # that finished jobs took

    async def run(self) -> None:
        """Until every job has its return."""
        client = await self._connect(CONNECT_S)
        while True:
            try:
                await self._session(client, self._left)
                return
            except _SchedulerLost as lost:
                self._say(f"the scheduler is lost ({lost}); its jobs wait for it to come back")
            try:
                client = await self._connect(self.wait_for_hosts_s)
            except BadInput as error:
                await asyncio.gather(*self.finishing)
                self._give_up(self.waiting, str(error))
                return
            self.able_since = time.monotonic()
            self._say("the scheduler is back")

    def _left(self) -> bool:
        return any(job.returned is None for job in self.jobs)

    async def survey(self) -> None:
        """Until one host is fit, and the others that are there were looked at or take long."""
        deadline = time.monotonic() + min(FIRST_HOST_S, self.wait_for_hosts_s)
        fit_since: float | None = None

        def unsure() -> bool:
            nonlocal fit_since
            hosts = self.hosts.values()
            if not hosts:
                return time.monotonic() < deadline
            if any(host.ready for host in hosts):
                fit_since = fit_since or time.monotonic()
            late = fit_since is not None and time.monotonic() > fit_since + SLOW_HOST_S
            return not late and any(not host.ready and host.refused is None for host in hosts)

        try:
            client = await self._connect(CONNECT_S)
            self._say("asking the hosts for their code, models and data")
            await self._session(client, unsure)
        except _SchedulerLost as lost:
            raise BadInput(f"expected a scheduler at {self.cluster.scheduler}, but it went away: {lost}") from lost
        if not self.hosts:
            raise BadInput(
                f"expected a worker at the scheduler {self.cluster.scheduler}, got none within {FIRST_HOST_S:.0f} s; "
                "start one on each machine that is to work: make worker"
            )
        if not any(host.ready for host in self.hosts.values()):
            reasons = "".join(f"\n  {host.name}: {host.refused}" for host in self.hosts.values())
            raise BadInput(f"expected a host that can do this sweep, got {len(self.hosts)} that cannot:{reasons}")

    async def _connect(self, patience_s: float) -> Client:
        deadline = time.monotonic() + patience_s
        while True:
            client = Client(
                self.cluster.scheduler,
                security=self.cluster.security(),
                timeout=CONNECT_S,
                asynchronous=True,
                set_as_default=False,
            )
            try:  # the time is ours as well: Dask waits for ever for what answers TLS and is no scheduler
                return await asyncio.wait_for(client, 2 * CONNECT_S)
            except (OSError, ValueError) as error:
                with suppress(Exception):
                    await asyncio.wait_for(client.close(), CONNECT_S)
                if time.monotonic() > deadline:
                    reason = await asyncio.to_thread(why_no_scheduler, self.cluster) or error.__cause__ or "no answer"
                    raise BadInput(
                        f"expected a scheduler at {self.cluster.scheduler}, got none that lets us in "
                        f"({reason}); start it there with `make head`, and have its newest "
                        f"{Path(self.outputs) / 'cluster' / 'join.pem'} here"
                    ) from error
                await asyncio.sleep(min(self.poll_s, 1))

    async def _session(self, client: Client, more: Callable[[], bool]) -> None:
        """Look after hosts and jobs through one connection to the scheduler."""
        self.client, self.changed, self.broken, self.hosts = client, asyncio.Event(), False, {}
        try:
            while more():
                self.changed.clear()
                self._look_after(await self._workers())
                if self.stop is not None:
                    raise self.stop
                self._hand_out()
                self._give_up_what_cannot_run()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), self.poll_s)
        except _SchedulerLost:
            raise
        except BaseException:  # Ctrl-C is an asyncio.CancelledError here
            await self._interrupt()
            raise
        finally:
            for host in self.hosts.values():
                self._leave(host)
            with suppress(Exception):
                await asyncio.wait_for(client.close(), 5)

    async def _workers(self) -> dict[str, str]:
        """Address -> name of the workers that have a GPU to give. Raises _SchedulerLost."""
        if self.broken or self.client.status != "running":
            raise _SchedulerLost("the connection broke")
        try:
            identity = await asyncio.wait_for(self.client.scheduler.identity(n_workers=-1), SILENCE_S)
        except (OSError, TimeoutError, AttributeError) as error:  # the last: closed while we asked
            raise _SchedulerLost(str(error) or f"no answer for {SILENCE_S:.0f} s") from error
        workers = identity["workers"].items()
        return {address: str(worker["name"]) for address, worker in workers if worker["resources"].get("GPU", 0) >= 1}

    # hosts

    def _look_after(self, workers: Mapping[str, str]) -> None:
        """Notice which hosts came and went."""
        for address in self.hosts.keys() - workers.keys():
            host = self.hosts.pop(address)
            held = f"; {host.job.name} goes to another" if host.job else ""
            self._say(f"host {host.name} is gone{held}")
            self._leave(host)
        for address in workers.keys() - self.hosts.keys():
            host = self.hosts[address] = _Host(address, workers[address])
            if address not in self.checked:
                self._say(f"host {host.name} joined")
            host.work = asyncio.create_task(self._check(host))

    def _leave(self, host: _Host) -> None:
        """No more of this host: Dask lets go of what it does for us, and its job waits again."""
        if host.work is not None:
            host.work.cancel()
        if (job := host.job) is not None:
            host.job = None
            job.losses += 1
            self.waiting.append(job)
            if job.losses > MOST_LOSSES:
                self._give_up([job], f"its host vanished {job.losses} times while it ran")

    async def _check(self, host: _Host) -> None:
        """Whether the host runs our code and has models and data; it is ready or refused afterwards."""
        for look in range(LOOKS):
            try:
                if host.address in self.checked:
                    host.about = self.checked.pop(host.address)
                    self.equipped.add(host.name)
                elif self.wanted:
                    await self._compare(host)
                else:
                    host.about = {}
                break
            except _OwnFault as error:
                self.stop = BadInput(str(error))
                break
            except Exception as error:  # whatever goes wrong there must not end the sweep here
                if look == LOOKS - 1 or not isinstance(error, OSError | TimeoutError):
                    host.refused = f"it could not be looked at ({type(error).__name__}: {error})"
                    break
        if host.refused is None:
            if not host.ready and self.wanted and not self.jobs:
                self._say(f"host {host.name} has the code, models and data")
            host.ready = True
            self.largest = max(self.largest, host.memory)
        else:
            self._say(f"host {host.name} gets no jobs: {host.refused}")
        self.changed.set()

    async def _compare(self, host: _Host) -> None:
        if self.own is None:
            self.own = asyncio.create_task(self._describe_own())
        about = await asyncio.wait_for(self._ask(host, _host.describe, self.outputs), DESCRIBE_S)
        own, found_here = await asyncio.shield(self.own)
        host.refused = about.get("error") or _difference(own, about)
        if host.refused is not None:
            return
        host.about = about
        self.changed.set()
        if host.name in self.equipped:  # it was away; a job that misses something gets it itself
            return
        found = await self._prefetched(host)
        if "error" in found:
            host.refused = f"it has no models or data: {found['error']}"
        elif found["lines"] != found_here["lines"]:
            differ = next(pair for pair in zip(found_here["lines"], found["lines"], strict=True) if pair[0] != pair[1])
            host.refused = _other_inputs(*differ, self.outputs)
        else:
            self.equipped.add(host.name)

    async def _prefetched(self, host: _Host) -> dict[str, Any]:
        """What prefetch says there. A download takes as long as it takes; that it goes on is said now and then."""
        begin = time.monotonic()
        asked = asyncio.create_task(self._ask(host, _host.prefetch, self.outputs, json.dumps(self.wanted)))
        try:
            while not (await asyncio.wait({asked}, timeout=PREFETCH_TOLD_S))[0]:
                self._say(f"host {host.name} is still getting models and data ({_duration(time.monotonic() - begin)})")
            return asked.result()
        finally:
            asked.cancel()

    async def _ask(self, host: _Host, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
        """What `function` of _host says there; it runs beside a job."""
        answers: dict[str, dict[str, Any]] = await self.client.run(function, *args, workers=[host.address])
        return answers[host.address]

    async def _describe_own(self) -> tuple[dict[str, Any], dict[str, Any]]:
        own, found = await asyncio.gather(
            _host.describe(self.outputs), _host.prefetch(self.outputs, json.dumps(self.wanted))
        )
        if error := own.get("error") or found.get("error"):
            raise _OwnFault(error)
        return own, found

    # jobs

    def _hand_out(self) -> None:
        """Each host that is free gets the largest job that it can hold."""
        for host in self.hosts.values():
            if not host.ready or host.job is not None or host.name in self.unfit:
                continue
            fitting = [job for job in self.waiting if job.memory <= host.memory]
            if fitting:
                job = min(fitting, key=lambda job: (host.name in job.died_at, -job.memory, job.index))
                self.waiting.remove(job)
                host.job, host.key = job, f"{self.id}-{next(self.attempts)}-{job.name}"
                host.work = asyncio.create_task(self._do(host, job))

    async def _do(self, host: _Host, job: _Job) -> None:
        """One attempt. Where it is cancelled the host is gone, and _leave has put the job back."""
        started = time.monotonic()
        answer: dict[str, Any]
        if (job.deaths or job.losses) and await asyncio.to_thread(_finished, job.cfg):
            answer = {"kind": "found"}
        else:
            self._say(f"{job.name}  starts on {host.name}")
            answer = await self._answer(host, job)
        if answer["kind"] == "stop":  # before the host is free for another job
            self.stop = cloudpickle.loads(answer["error"])
        host.job = None
        self.changed.set()
        finish = asyncio.create_task(self._put_away(job, host.name, answer, time.monotonic() - started))
        self.finishing.add(finish)
        finish.add_done_callback(self.finishing.discard)

    async def _answer(self, host: _Host, job: _Job) -> dict[str, Any]:
        future: Future = self.client.submit(
            _ByValue(_host.run_job),
            *(host.key, job.payload, job.folder),
            key=host.key,
            workers=[host.address],
            allow_other_workers=False,
            resources={"GPU": 1},
            pure=False,
        )
        try:
            return dict(await future)
        except concurrent.futures.CancelledError:  # the connection to the scheduler broke, and may be back by now
            self.broken = True
            self.changed.set()
            await asyncio.Event().wait()
            raise
        except Exception as error:  # its worker died again and again, or could not even start it
            return {"kind": "died", "status": None, "log": f"{type(error).__name__}: {error}", "attempt": None}
        finally:
            future.release()  # a result that lies in a worker only would be computed again when that worker dies

    async def _put_away(self, job: _Job, host: str, answer: dict[str, Any], seconds: float) -> None:
        try:
            await self._finish(job, host, answer, seconds)
        except Exception as error:
            told = f"its result could not be read here ({type(error).__name__}: {error})"
            self._failed(job, told, f"{told}\n{traceback.format_exc()}")
        self.changed.set()

    async def _finish(self, job: _Job, host: str, answer: dict[str, Any], seconds: float) -> None:
        """What an attempt's answer means for the job."""
        kind = answer["kind"]
        if kind == "completed":
            returned: JobReturn = cloudpickle.loads(answer["returned"])
            if "folder" in answer:
                try:
                    await asyncio.to_thread(_unpack, answer["folder"], Path(str(job.folder)))
                except (OSError, tarfile.TarError) as error:
                    self._say(
                        f"{job.name}: its folder {job.folder} stays on {host}, it could not be stored here: {error}"
                    )
            self.seconds.append(seconds)
            job.returned = returned
            self._say(f"{job.name}  {host}  {_told(returned)}  {_duration(seconds)}{self._eta()}")
        elif kind == "found":
            job.returned = JobReturn(job.overrides, job.cfg, status=JobStatus.COMPLETED, _return_value={})
            self._say(f"{job.name}  an attempt given up had finished")
        elif kind == "failed":
            text = f"{answer['reason']}\non {host}\n{answer['traceback']}\nlast lines of its log:\n{answer['log']}"
            self._failed(job, f"failed on {host}: {answer['reason']}", text)
        elif kind == "unfit":
            self.unfit[host] = answer["reason"]
            job.losses += 1  # it may have finished before its host failed
            self.waiting.append(job)
            self._say(f"host {host} gets no more jobs: {answer['reason']}; {job.name} goes to another")
        elif kind == "interrupted":
            await asyncio.to_thread(_end_attempt, job.cfg, answer["attempt"], "KILLED", "interrupted")
            self.waiting.append(job)
        elif kind == "died":
            await self._died(job, host, answer)

    async def _died(self, job: _Job, host: str, answer: dict[str, Any]) -> None:
        job.deaths += 1
        job.died_at.add(host)
        how = f"its process died on {host} ({_ending(answer['status'])})"
        again = job.deaths <= self.retries
        job.attempt = answer["attempt"] or job.attempt  # this one may have died before it had a run
        ending = ("KILLED", "its process died") if again else ("FAILED", f"{how}, try {job.deaths}")
        await asyncio.to_thread(_end_attempt, job.cfg, job.attempt, *ending)
        if again:
            self.waiting.append(job)
            self._say(f"{job.name}: {how}; try {job.deaths + 1} of {self.retries + 1} follows")
        else:
            self._failed(job, f"{how}, {job.deaths} times in all", f"{how}\nlast lines of its log:\n{answer['log']}")

    async def _interrupt(self) -> None:
        """End the jobs that are running, and wait until they are over."""
        busy = [host for host in self.hosts.values() if host.job is not None]
        asked = (self._ask(host, _host.interrupt_job, host.key) for host in busy)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                answers = await asyncio.gather(*asked, return_exceptions=True)
                running = [host.work for host, there in zip(busy, answers, strict=True) if there is True]
                await asyncio.gather(*filter(None, running), return_exceptions=True)
                await asyncio.gather(*self.finishing, return_exceptions=True)

    # what cannot be done

    def _give_up_what_cannot_run(self) -> None:
        """Jobs that wait though every host is idle fit nowhere; and there may be no host at all for too long."""
        now = time.monotonic()
        able = [host for host in self.hosts.values() if host.refused is None and host.name not in self.unfit]
        idle = all(host.ready and host.job is None for host in able)
        too_large = [job for job in self.waiting if job.memory > self.largest] if able and idle else []
        for job in too_large:
            self.waiting.remove(job)
            need = f"it needs {_gib(job.memory)}, and the largest host has {_gib(self.largest)}"
            self._failed(job, f"fits no host: {need}", f"expected a host that can hold the job: {need}")
        if (able and not idle) or not self.waiting:
            self.able_since = now
        elif now - self.able_since > self.wait_for_hosts_s:
            why = [f"{host.name}: {host.refused or self.unfit.get(host.name)}" for host in self.hosts.values()]
            self._give_up(self.waiting, f"no host could run it for {self.wait_for_hosts_s:.0f} s; " + "; ".join(why))

    def _give_up(self, jobs: Sequence[_Job], reason: str) -> None:
        for job in list(jobs):
            self.waiting.remove(job)
            self._failed(job, reason, reason)

    def _failed(self, job: _Job, short: str, text: str) -> None:
        job.returned = JobReturn(job.overrides, job.cfg, status=JobStatus.FAILED, _return_value=JobFailed(short, text))
        rest = text.partition("\n")[2]
        self._say(f"{job.name}  {short}" + (f"\n{rest}" if rest else ""))

    # what is said

    def _say(self, event: str) -> None:
        if self.jobs:
            total = len(self.jobs)
            done = sum(job.returned is not None for job in self.jobs)
            event = f"[{done:>{len(str(total))}}/{total}] {event}"
        print(event, flush=True)

    def _eta(self) -> str:
        left = sum(job.returned is None for job in self.jobs)
        width = sum(host.ready for host in self.hosts.values()) or 1
        mean = sum(self.seconds) / len(self.seconds)
        return f"  about {_duration(mean * left / width)} left" if left else ""


class _OwnFault(Exception):
    pass


def _other_inputs(own: Mapping[str, Any], there: Mapping[str, Any], outputs: str) -> str:
    """What of model and data differs, and what mends it."""
    names = [name for name in own if own[name] != there.get(name)]
    which = " and ".join({"data": "data", "dtype": "dtype"}.get(name, f"model {name}") for name in names)
    values = ", ".join(f"{own[name]} here, {there.get(name)} there" for name in names)
    folder = f"{outputs}/{'data' if names == ['data'] else 'models'}"
    return f"other {which} ({values}); delete {folder} on the machine that is out of date, then restart its worker"


def _difference(own: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """Why jobs of this machine's sweep must not run there, and what mends it."""
    if own["backend"] != there["backend"]:
        return (
            f"its backend is {there['backend']}, this machine's is {own['backend']}, and results of the two do not "
            "compare; start the sweep on a machine like it"
        )
    host = there["host"]
    if any(own[name] != there[name] for name in ("code", "launcher")):
        return (
            f"other code: expected that of commit {own['commit']}, got {there['commit']}; "
            f"run `git pull && make setup` on {host}, then restart its worker"
        )
    if own["versions"] != there["versions"]:
        names = sorted(
            n for n in own["versions"] | there["versions"] if own["versions"].get(n) != there["versions"].get(n)
        )
        differ = ", ".join(f"{n} {own['versions'].get(n)} here, {there['versions'].get(n)} there" for n in names)
        return f"other libraries ({differ}); run `make setup` on {host}, then restart its worker"
    if own["lock"] != there["lock"]:
        return f"another requirements.lock; run `git pull && make setup` on {host}, then restart its worker"
    return None


# -- jobs of the pipeline; others have no cfg.sweep --------------------------------------------------------------------


def _finished(cfg: DictConfig) -> bool:
    """Whether an attempt that was given up has published the job after all."""
    if not OmegaConf.select(cfg, "sweep.run_id"):
        return False
    from pipeline import tracking

    try:
        return bool(tracking.finished(_sweep(cfg), [cfg.sweep.job]))
    except Exception:  # no answer, or none that we understand: the job runs again, and is published once all the same
        return False


def _end_attempt(cfg: DictConfig, run_id: str | None, status: str, reason: str) -> None:
    """End the run of an attempt whose process is known to be gone."""
    if not OmegaConf.select(cfg, "sweep.run_id") or run_id is None:
        return
    from pipeline import tracking

    try:
        with tracking.talking_to(cfg.sweep.uri) as client:
            if client.get_run(run_id).info.status in ("RUNNING", "KILLED"):
                tracking.end(client, run_id, status, reason)
    except Exception as error:  # its lease runs out
        print(f"the run {run_id} could not be set {status}: {error}", flush=True)


def _sweep(cfg: DictConfig) -> Any:
    from pipeline import tracking

    return tracking.Sweep(cfg.sweep.uri, cfg.sweep.experiment_id, cfg.sweep.run_id, cfg.experiment_name, cfg.sweep.key)


_LAST = {"score.json": 1, "published.json": 2}  # with the first a folder counts as finished


def _unpack(packed: bytes, folder: Path) -> None:
    """The files of a job into its folder here, each whole or not at all; what says that it is whole comes last.

    A folder that another process of this machine works in is left alone: its own result is as good.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            members = [member for member in tar.getmembers() if member.isfile()]
            for member in sorted(members, key=lambda member: _LAST.get(member.name, 0)):
                if Path(member.name).name != member.name or member.name == "..":
                    raise OSError(f"expected plain file names in a job's folder, got {member.name!r}")
                content = tar.extractfile(member)
                assert content is not None
                draft = folder / ".arriving.tmp"
                try:
                    draft.write_bytes(content.read())
                    os.utime(draft, (member.mtime, member.mtime))
                    os.replace(draft, folder / member.name)
                finally:
                    draft.unlink(missing_ok=True)


# -- words -------------------------------------------------------------------------------------------------------------


def _told(returned: JobReturn) -> str:
    if returned.cfg is None or "sweep" not in returned.cfg:
        return "done"
    from pipeline.run import told

    return told(returned._return_value)


def _ending(status: int | None) -> str:
    if status is None:
        return "with its worker"
    if status >= 0:
        return f"exit code {status}"
    return signal.Signals(-status).name if -status in {s.value for s in signal.Signals} else f"signal {-status}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
