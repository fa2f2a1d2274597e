//! The protocol against a scripted device: which order the steps come in, and which outputs are refused.

use super::*;
use crate::units::Bytes;

/// Notes each call and answers outputs from a list, the last one for ever.
struct Scripted {
    calls: Vec<&'static str>,
    outputs: Vec<Vec<f32>>,
    time: Box<dyn FnMut() -> f64>,
}

impl Scripted {
    fn new(outputs: &[f32]) -> Self {
        let outputs = outputs.iter().map(|&value| vec![value; 4]).collect();
        Self { calls: Vec::new(), outputs, time: Box::new(|| 100.0) }
    }

    fn next<T: Clone>(list: &mut Vec<T>) -> T {
        if list.len() > 1 { list.remove(0) } else { list[0].clone() }
    }
}

impl Capture for Scripted {
    fn timer(&self) -> &'static str {
        "script"
    }
    fn snapshot(&mut self) -> Result<Bytes, BackendError> {
        self.calls.push("snapshot");
        Ok(Bytes(64))
    }
    fn restore(&mut self) -> Result<(), BackendError> {
        self.calls.push("restore");
        Ok(())
    }
    fn eager(&mut self) -> Result<(), BackendError> {
        self.calls.push("eager");
        Ok(())
    }
    fn record(&mut self) -> Result<(), BackendError> {
        self.calls.push("record");
        Ok(())
    }
    fn replay(&mut self) -> Result<Replay, BackendError> {
        self.calls.push("replay");
        Ok(Replay { time: Nanos((self.time)()), clock_mhz: None })
    }
    fn output(&mut self) -> Result<Vec<f32>, BackendError> {
        self.calls.push("output");
        Ok(Self::next(&mut self.outputs))
    }
}

fn protocol() -> Protocol {
    Protocol::own_models(0.05).without_warm_up()
}

fn refusal(outputs: &[f32]) -> &'static str {
    match prepare(&mut Scripted::new(outputs), &protocol()) {
        Err(MeasureError::Check { name, .. }) => name,
        other => panic!("expected a failed check, found {other:?}"),
    }
}

#[test]
fn steps_come_in_the_order_of_the_protocol() {
    let mut capture = Scripted::new(&[1.0]);
    let prepared = prepare(&mut capture, &protocol()).unwrap();
    let expected = "eager snapshot restore eager output restore eager output record \
                    replay output replay output replay";
    assert_eq!(capture.calls.join(" "), expected);
    assert_eq!(prepared.checks.state_reset_bytes, 64);
    assert!(prepared.checks.finite && prepared.checks.graph_deterministic);
}

#[test]
fn each_check_refuses_what_it_is_for() {
    assert_eq!(refusal(&[1.0, 1.5]), "eager_repeat");
    assert_eq!(refusal(&[1.0, 1.0, 1.1]), "graph_vs_eager");
    assert_eq!(refusal(&[1.0, 1.0, 1.0, 1.000_000_1]), "graph_deterministic");
    assert_eq!(refusal(&[f32::NAN]), "finite");
    assert_eq!(refusal(&[1.0, 1.0, f32::INFINITY]), "finite");
}

#[test]
fn a_users_forward_may_differ_between_runs() {
    let lenient = Protocol { exact_repeat: false, graph_tolerance: 1.0, ..protocol() };
    let prepared = prepare(&mut Scripted::new(&[1.0, 1.5, 1.0, 1.25]), &lenient).unwrap();
    assert_eq!(prepared.checks.eager_repeat.max_abs, 0.5);
    assert!(!prepared.checks.graph_deterministic);
}

#[test]
fn warm_up_ends_when_times_agree_and_gives_up_at_its_limit() {
    let protocol = Protocol {
        min_warm_up: Duration::from_millis(3),
        max_warm_up: Duration::from_millis(60),
        ..Protocol::own_models(0.05)
    };
    let mut constant = Scripted::new(&[1.0]);
    assert!(prepare(&mut constant, &protocol).unwrap().steady);
    let mut drifting = Scripted::new(&[1.0]);
    let begin = Instant::now();
    drifting.time = Box::new(move || (begin.elapsed().as_secs_f64() * 1e3).exp2());
    assert!(!prepare(&mut drifting, &protocol).unwrap().steady);
}

#[test]
fn the_clocks_span_is_relative_to_its_median() {
    let replay = |clock| Replay { time: Nanos(1.0), clock_mhz: clock };
    assert_eq!(clock_span(&[replay(None)]), None);
    let span = clock_span(&[replay(Some(1900.0)), replay(Some(2000.0)), replay(Some(2000.0))]).unwrap();
    assert!((span - 0.05).abs() < 1e-12);
}
