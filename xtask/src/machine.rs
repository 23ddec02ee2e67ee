//! How busy the machine was with what is not ours: a figure taken beside a compiler says little about the relay.

use anyhow::{Context, Result};
use std::collections::HashMap;
use std::time::Instant;

/// The kernel counts CPU time in hundredths of a second, on every Linux that we build for.
pub(crate) const TICK_US: u64 = 10_000;

/// Counts from its start on.
pub(crate) struct Watch {
    start: Instant,
    busy: u64,
    ours: u64,
}

impl Watch {
    pub(crate) fn start() -> Result<Watch> {
        Ok(Watch { start: Instant::now(), busy: busy()?, ours: ours()? })
    }

    /// Cores that were busy, on average, with processes that neither this one nor its children started.
    pub(crate) fn foreign_cores(&self) -> Result<f64> {
        let foreign = (busy()? - self.busy).saturating_sub(ours()? - self.ours);
        let seconds = foreign as f64 * TICK_US as f64 / 1e6;
        Ok((seconds / self.start.elapsed().as_secs_f64() * 100.0).round() / 100.0)
    }
}

/// Ticks of all CPUs outside idle and waiting.
fn busy() -> Result<u64> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line =
        stat.lines().next().and_then(|l| l.strip_prefix("cpu ")).context("/proc/stat does not begin with cpu")?;
    let ticks: Vec<u64> = line.split_whitespace().filter_map(|t| t.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq; what virtual guests take is in user already.
    Ok(ticks.iter().enumerate().filter(|(n, _)| ![3, 4].contains(n) && *n < 7).map(|(_, t)| t).sum())
}

/// Ticks of this process and of its descendants.
fn ours() -> Result<u64> {
    family(std::process::id())
}

/// Ticks of a process and of all that descend from it, with those that they have buried.
pub(crate) fn family(root: u32) -> Result<u64> {
    let mut processes = HashMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let pid = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        // A process may end while we look; then it counts with its parent.
        if let Some((pid, times)) = pid.and_then(|pid| Some((pid, times(pid)?))) {
            processes.insert(pid, times);
        }
    }
    let descends = |mut pid: u32| {
        while pid != root {
            match processes.get(&pid) {
                Some(times) => pid = times.parent,
                None => return false,
            }
        }
        true
    };
    Ok(processes.iter().filter(|(pid, _)| descends(**pid)).map(|(_, t)| t.own + t.buried).sum())
}

/// What the kernel counts about a process, in ticks.
pub(crate) struct Times {
    parent: u32,
    pub(crate) own: u64,
    buried: u64,
}

/// Of one process, while it is there.
pub(crate) fn times(pid: u32) -> Option<Times> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold anything. After it: state, ppid, .., utime, stime, cutime, cstime.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let tick = |n: usize| fields.get(n)?.parse::<u64>().ok();
    Some(Times { parent: fields.get(1)?.parse().ok()?, own: tick(11)? + tick(12)?, buried: tick(13)? + tick(14)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_work_is_seen() {
        let (busy_before, ours_before) = (busy().unwrap(), ours().unwrap());
        let start = Instant::now();
        while ours().unwrap() - ours_before < 20 {
            assert!(start.elapsed().as_secs() < 60, "a busy loop of 0.2 s is not seen");
        }
        assert!(busy().unwrap() - busy_before >= 15, "the machine was as busy as we were");
    }
}
