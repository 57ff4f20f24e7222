//! The order in which the work of streams runs: any order that CUDA allows, chosen by the seed.
use super::exec::Exec;
use super::stream::{HostCall, Op, Stream, Work};
use super::{CHANGED, Effort, IN_HOST_FUNCTION, Sim, lock};
use crate::clock::Mark;
use crate::memory::Accessor;
use crate::nccl::Comms;
use crate::report::{Kind, Site, die, fault};
use crate::settings;
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How streams make progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Policy {
    /// Everything runs as soon as it can.
    Eager,
    /// Nothing runs before a thread waits.
    Lazy,
    /// A random number of operations runs after each call.
    Random,
    /// As `Random`, and the stream with the highest priority goes first; priorities change at random.
    Priorities,
}

impl Policy {
    /// Returns the policy of a seed. All four take turns.
    pub(super) fn of(seed: u64) -> Self {
        [Self::Eager, Self::Lazy, Self::Random, Self::Priorities][(seed % 4) as usize]
    }
}

impl Sim {
    /// Returns whether the first operation of a stream can be issued, or can run.
    fn is_ready(&self, id: u64, stream: &Stream) -> bool {
        let Some(op) = stream.queue.front() else { return false };
        if !op.waits.iter().all(Mark::is_passed) {
            return false;
        }
        if !op.is_issued {
            return self.queues.head(stream.line) == Some(id);
        }
        self.can_run(stream.device, &op.work)
    }

    /// Returns how many CTAs of a device are free.
    fn room(&self, device: usize) -> usize {
        self.rules.ctas.saturating_sub(self.held[device])
    }

    /// Returns whether a device that has been given this work can go on with it.
    fn can_run(&self, device: usize, work: &Work) -> bool {
        match work {
            Work::Nccl(launch) => {
                self.comms.can_advance(launch, launch.ctas == launch.held || self.room(device) > 0)
            }
            // It takes as many as there are.
            Work::Kernel(_) => self.room(device) > 0,
            _ => true,
        }
    }

    /// Runs the first operation of a stream, or a part of it.
    fn advance(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Some(mut op) = stream.queue.pop_front() else { return };
        self.progress += 1;
        let (device, agent, line) = (stream.device, stream.agent, stream.line);
        if !std::mem::replace(&mut op.is_issued, true) {
            self.queues.take(line);
        }
        if !self.can_run(device, &op.work) {
            self.streams.entry(id).and_modify(|stream| stream.queue.push_front(op));
            return;
        }
        let room = self.room(device);
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let mut clock = stream.clock.clone();
        {
            let clock = Arc::make_mut(&mut clock);
            clock.join(&op.host);
            for wait in &op.waits {
                if let Some(earlier) = wait.passed() {
                    clock.join(&earlier);
                }
            }
            clock.set(agent, clock.get(agent) + 1);
        }
        // The timeline does not depend on the order in which the simulator runs the work.
        let mut at = op.waits.iter().fold(op.issued.max(stream.free), |at, wait| at.max(wait.at()));
        let mut again = false;
        match op.work {
            Work::Nothing => {}
            Work::Run(run) | Work::Copy(run) | Work::Kernel(run) => {
                let who = Accessor { clock: &clock, agent, site: &op.site };
                let mut exec = Exec { memory: &mut self.memory, who, device, effort: Effort::default() };
                run(&mut exec);
                at = self.timeline.computes(device, at, exec.effort);
                op.work = Work::Nothing;
            }
            Work::Host(HostCall(function, argument)) => {
                IN_HOST_FUNCTION.set(true);
                function(argument as *mut std::ffi::c_void);
                IN_HOST_FUNCTION.set(false);
                op.work = Work::Nothing;
            }
            Work::Nccl(ref mut launch) => {
                // Blocks of a kernel come to a device as it has room, and hold it while they wait for the others.
                let taken = room.min(launch.ctas - launch.held);
                launch.held += taken;
                self.held[device] += taken;
                let work = (&mut self.memory, &mut clock, &mut at, &mut self.timeline);
                again = !self.comms.advance(launch, work, agent, device, &op.site);
                if !again {
                    self.held[device] -= launch.held;
                }
            }
        }
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.clock = clock.clone();
        stream.free = at;
        if again {
            stream.queue.push_front(op);
            return;
        }
        op.mark.pass(clock, at);
        if stream.destroyed && stream.queue.is_empty() {
            self.remove(id);
        }
    }

    /// Runs one operation. Returns whether there was one that could run.
    pub(crate) fn step(&mut self) -> bool {
        let ready: Vec<u64> = self
            .streams
            .iter()
            .filter(|(id, stream)| self.is_ready(**id, stream))
            .map(|(&id, _)| id)
            .collect();
        if ready.is_empty() {
            return false;
        }
        let at = match self.policy {
            Policy::Priorities => {
                let chosen = ready.iter().max_by_key(|id| self.streams.get(id).map(|stream| stream.turn));
                let chosen = *chosen.unwrap_or(&ready[0]);
                if self.random.below(16) == 0 {
                    let turn = self.random.below(1 << 20);
                    self.streams.entry(chosen).and_modify(|stream| stream.turn = turn);
                }
                chosen
            }
            _ => ready[self.random.below(ready.len() as u64) as usize],
        };
        self.advance(at);
        true
    }

    /// Lets streams advance after a call of the host.
    pub(crate) fn after_call(&mut self) {
        let steps = match self.policy {
            Policy::Eager => u64::MAX,
            Policy::Lazy => 0,
            Policy::Random | Policy::Priorities => self.random.below(4),
        };
        let mut done = 0;
        while done < steps && self.step() {
            done += 1;
        }
        CHANGED.notify_all();
    }

    /// Lets streams advance while the host polls.
    pub(crate) fn while_polling(&mut self) {
        self.comms.poll();
        Comms::launch_due(self);
        for _ in 0..self.random.below(4) {
            if !self.step() {
                break;
            }
        }
        CHANGED.notify_all();
        self.look_for_the_end();
    }

    /// Ends the process if threads only poll, and nothing can run any more. Other processes may take longer.
    fn look_for_the_end(&mut self) {
        let (progress, since) = self.idle.unwrap_or((u64::MAX, Instant::now()));
        if progress != self.progress {
            self.idle = Some((self.progress, Instant::now()));
        } else if since.elapsed() >= settings::get().hang && settings::get().folder.is_none() {
            let blocked = self.blocked();
            if !blocked.is_empty() {
                fault(Kind::Deadlock, "polls", format!("threads poll, and nothing can run:{blocked}"));
                die("ended after a deadlock");
            }
        }
    }

    /// Describes what every stream waits for.
    fn blocked(&self) -> String {
        let heads = self.streams.iter().filter_map(|(id, stream)| Some((id, stream, stream.queue.front()?)));
        let line = |(id, stream, op): (&u64, &Stream, &Op)| {
            let (device, priority, queue) = stream.line;
            let why = match &op.work {
                _ if !op.waits.iter().all(Mark::is_passed) => "another stream".to_string(),
                _ if !op.is_issued => {
                    format!("what is before it in hardware queue {queue} of priority {priority}")
                }
                Work::Nccl(launch) if launch.started => self.comms.lacks(launch),
                Work::Nccl(launch) => {
                    format!("{} CTAs of {}", launch.ctas - launch.held, self.rules.ctas)
                }
                _ => "a CTA".to_string(),
            };
            format!("\n  GPU {device} stream {id:#x} {:?}: {} waits for {why}", stream.kind, op.site)
        };
        heads.map(line).chain(self.comms.unconnected()).collect()
    }
}

/// Waits until `done`, while streams advance. Ends the process if nothing can happen any more.
pub(crate) fn wait(sim: &mut MutexGuard<'static, Sim>, what: &Arc<Site>, mut done: impl FnMut(&Sim) -> bool) {
    let (mut progress, mut since) = (sim.progress, Instant::now());
    while !done(sim) {
        sim.comms.poll();
        Comms::launch_due(sim);
        if sim.step() {
            CHANGED.notify_all();
            // Other threads must be able to enqueue work in between.
            MutexGuard::bump(sim);
            continue;
        }
        CHANGED.wait_for(sim, Duration::from_millis(2));
        if sim.progress != progress {
            (progress, since) = (sim.progress, Instant::now());
        } else if since.elapsed() >= settings::get().hang {
            let text = format!("{what} waits, and nothing can run:{}", sim.blocked());
            fault(Kind::Deadlock, what.call(), &text);
            die("ended after a deadlock");
        }
    }
}

/// Waits for work because CUDA may, in a call that does not promise it: the host has seen nothing afterwards.
pub(crate) fn wait_for_marks(sim: &mut MutexGuard<'static, Sim>, what: &Arc<Site>, marks: &[Mark]) {
    if sim.rules.waits {
        wait(sim, what, |_| marks.iter().all(Mark::is_passed));
    }
}

/// As [`wait_for_marks`], for all work of a device.
pub(crate) fn wait_for_device(sim: &mut MutexGuard<'static, Sim>, device: usize, what: &Arc<Site>) {
    let tails = sim.tails(device);
    wait_for_marks(sim, what, &tails);
}

/// Starts a thread that advances the streams, for processes that wait for each other.
pub(crate) fn keep_running() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        let run = || loop {
            std::thread::sleep(Duration::from_micros(300));
            lock().while_polling();
        };
        if std::thread::Builder::new().name("nccl-sim".into()).spawn(run).is_err() {
            die("no thread");
        }
    });
}
