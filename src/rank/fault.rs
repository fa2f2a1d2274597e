//! Faults on demand, for tests: what a rank does wrong, at which step.
//!
//! `FORWARD_BENCH_FAULT=stop@replay:1` stops rank 1 at its next replay; several are separated by commas. Actions: `panic`, `hang`
//! (the step never ends), `exit` (status 7, without a word), `kill` (SIGKILL), `stop` (SIGSTOP), `memory` (an allocation fails, which aborts),
//! `fail` (the step answers with a failure). Steps: `connect`, and the names of commands in lower case: `prepare`, `check`, `replay`, `profile`, `finish`.

use super::Reply;

/// The variable.
pub const VARIABLE: &str = "FORWARD_BENCH_FAULT";

/// Does what the variable asks of this rank at this step; nothing if it is unset. Returns whether the step is to fail.
///
/// # Panics
/// If it is asked to.
#[must_use]
pub fn at(step: &str, rank: usize) -> bool {
    let Some(action) = std::env::var(VARIABLE).ok().and_then(|text| wanted(&text, step, rank)) else {
        return false;
    };
    match action.as_str() {
        "fail" => return true,
        "panic" => panic!("asked to panic at {step}"),
        "exit" => std::process::exit(7),
        "memory" => std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u64; 1 << 20]>()),
        "kill" => signal(rustix::process::Signal::KILL),
        "stop" => signal(rustix::process::Signal::STOP),
        _ => loop {
            std::thread::park();
        },
    }
    false
}

/// The answer of a step that was asked to fail.
#[must_use]
pub fn reply(step: &str) -> Reply {
    Reply::failed(3, format!("asked to fail at {step}"))
}

fn signal(signal: rustix::process::Signal) {
    // That this process may signal itself is never refused.
    let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
}

fn wanted(text: &str, step: &str, rank: usize) -> Option<String> {
    let here = format!("@{step}:{rank}");
    text.split(',').find_map(|fault| fault.strip_suffix(&here)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::wanted;

    #[test]
    fn a_fault_is_of_one_step_and_one_rank() {
        let text = "panic@prepare:1,kill@replay:11";
        assert_eq!(wanted(text, "prepare", 1).as_deref(), Some("panic"));
        assert_eq!(wanted(text, "replay", 11).as_deref(), Some("kill"));
        assert_eq!(wanted(text, "replay", 1), None);
        assert_eq!(wanted(text, "prepare", 11), None);
    }
}
