//! Who gets which instant, and what it adds up to.

use super::*;

pub(super) fn activity(name: &str, part: Part, start_ns: u64, end_ns: u64) -> Activity {
    Activity { name: name.to_owned(), start_ns, end_ns, part }
}

fn forward(kernels: &[(&str, u64, u64)]) -> Traced {
    let activity = |&(name, start, end): &(&str, u64, u64)| activity(name, Part::Forward, start, end);
    Traced { activities: kernels.iter().map(activity).collect() }
}

fn profile(replays: &[Traced]) -> Profile {
    let names = Names::of(replays.iter().flat_map(|replay| &replay.activities).map(|a| a.name.as_str()));
    Profile::of(replays, &names)
}

fn us(profile: &Profile, name: &str) -> f64 {
    profile.kernels.iter().find(|kernel| kernel.name == name).unwrap().us
}

#[test]
fn an_overlap_belongs_to_the_kernel_that_started_first() {
    // B is launched early and waits for A; C for B, and ends before it; D follows a gap.
    let found = profile(&[forward(&[
        ("a", 1_000, 101_000),
        ("b", 51_000, 121_000),
        ("c", 61_000, 111_000),
        ("d", 131_000, 132_000),
    ])]);
    assert_eq!((us(&found, "a"), us(&found, "b"), us(&found, "c"), us(&found, "d")), (100.0, 20.0, 0.0, 1.0));
    assert_eq!((found.busy_us, found.span_us, found.activities), (121.0, 131.0, 4.0));
    let order: Vec<&str> = found.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    assert_eq!(order, ["a", "b", "d", "c"]);
}

/// The oracle: instant by instant, the running activity with the least start.
fn instant_by_instant(activities: &[Activity]) -> BTreeMap<String, u64> {
    let mut times = BTreeMap::new();
    for instant in 0..400 {
        let running = activities.iter().filter(|a| a.start_ns <= instant && instant < a.end_ns);
        if let Some(first) = running.min_by_key(|a| a.start_ns) {
            *times.entry(first.name.clone()).or_default() += 1;
        }
    }
    times
}

#[test]
fn a_sweep_finds_what_looking_at_every_instant_finds() {
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..200 {
        let mut starts: Vec<u64> = (0..12).map(|_| random(300)).collect();
        starts.sort_unstable();
        starts.dedup(); // of two that start at once, either may be first
        let activities: Vec<Activity> = starts
            .iter()
            .enumerate()
            .map(|(i, start)| activity(&format!("k{i}"), Part::Forward, *start, start + random(90)))
            .collect();
        let expected = instant_by_instant(&activities);
        let found: BTreeMap<String, u64> = exclusive(activities.iter().rev())
            .into_iter()
            .filter(|(_, nanos)| *nanos > 0)
            .map(|(activity, nanos)| (activity.name.clone(), nanos))
            .collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn what_comes_before_the_forward_is_set_apart() {
    let mut replay = forward(&[("a", 50_000, 60_000), ("b", 60_000, 62_000), ("b", 63_000, 65_000)]);
    replay.activities.push(activity("copy_segments", Part::Before, 1_000, 9_000));
    replay.activities.push(activity("clock_probe", Part::Before, 10_000, 12_000));
    let found = profile(&[replay]);
    assert_eq!(
        (found.pre_forward_us, found.span_us, found.busy_us, found.activities),
        (10.0, 15.0, 14.0, 3.0)
    );
    assert!(
        found.kernels.iter().all(|kernel| kernel.name != "copy_segments" && kernel.name != "clock_probe")
    );
    assert_eq!(
        found.kernels[1],
        KernelTime {
            name: "b".to_owned(),
            us: 4.0,
            pct: 100.0 * 4.0 / 14.0,
            calls: 2.0,
            example: "b".to_owned(),
        }
    );
}

#[test]
fn replays_are_averaged() {
    let found = profile(&[
        forward(&[("a", 0, 10_000), ("b", 10_000, 20_000)]),
        forward(&[("a", 0, 20_000), ("a", 30_000, 50_000)]),
    ]);
    assert_eq!((found.span_us, found.busy_us, found.activities), (35.0, 30.0, 2.0));
    assert_eq!((us(&found, "a"), us(&found, "b")), (25.0, 5.0));
    assert_eq!(found.kernels[0].calls, 1.5);
    assert_eq!(profile(&[]), Profile::default());
}

#[test]
fn two_variants_of_one_template_stay_two_kernels() {
    let found = profile(&[forward(&[("_ZN1n1kIfLi4EEEvv", 0, 1_000), ("_ZN1n1kIfLi8EEEvv", 1_000, 3_000)])]);
    let names: Vec<(&str, f64)> = found.kernels.iter().map(|k| (k.name.as_str(), k.us)).collect();
    assert_eq!(names, [("k<float, 8>", 2.0), ("k<float, 4>", 1.0)]);
    assert_eq!(found.kernels[0].example, "void n::k<float, 8>()");
}
