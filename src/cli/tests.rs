//! The command line: short forms, modes, baselines, and what is passed on to Criterion.

use super::*;
use clap::CommandFactory;

fn expanded(line: &str) -> String {
    expand(line.split(' ').map(str::to_owned)).join(" ")
}

fn parse(line: &str) -> Cli {
    Cli::parse_from(expand(format!("bench {line}").split(' ').filter(|w| !w.is_empty()).map(str::to_owned)))
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn short_layout_flags_become_long() {
    assert_eq!(expanded("b -tp 2 -dp=4"), "b --tensor-parallel-size 2 --data-parallel-size=4");
    assert_eq!(expanded("b -pp 1 -ep"), "b --pipeline-parallel-size 1 --enable-expert-parallel");
    assert_eq!(expanded("b -- -tp"), "b -- -tp");
    assert_eq!(parse("-tp 2").tensor_parallel_size, 2);
}

#[test]
fn an_optional_percentage_does_not_swallow_the_filter() {
    let cli = parse("--fail-on-regression decode");
    assert_eq!((cli.comparison.fail_on_regression, cli.filter.as_deref()), (Some(0.0), Some("decode")));
    let cli = parse("--fail-on-regression 2.5 decode");
    assert_eq!((cli.comparison.fail_on_regression, cli.filter.as_deref()), (Some(2.5), Some("decode")));
}

#[test]
fn optional_values_come_after_an_equals_sign_only() {
    let cli = parse("--plan decode");
    assert_eq!((cli.plan, cli.filter.as_deref()), (Some(PlanFormat::Table), Some("decode")));
    assert_eq!(parse("--plan=json").plan, Some(PlanFormat::Json));
}

#[test]
fn modes_are_criterions() {
    assert_eq!(parse("").mode(), Mode::Test);
    assert_eq!(parse("--bench").mode(), Mode::Measure);
    assert_eq!(parse("--bench --test").mode(), Mode::Test);
    assert_eq!(parse("--bench --list").mode(), Mode::List);
    assert_eq!(parse("--bench --profile-time 1").mode(), Mode::Profile);
    assert_eq!(parse("--bench --load-baseline a --baseline b").mode(), Mode::Load);
}

#[test]
fn baselines_that_are_saved_and_compared() {
    assert_eq!(parse("--bench").saved_baseline(), Some("base"));
    assert_eq!(parse("--bench --save-baseline a").saved_baseline(), Some("a"));
    assert_eq!(parse("--bench --baseline a").saved_baseline(), None);
    assert_eq!(parse("--bench --baseline a").compared_baseline(), ("a", true));
    assert_eq!(parse("--bench --baseline-lenient a").compared_baseline(), ("a", false));
    assert_eq!(parse("--bench --discard-baseline").saved_baseline(), None);
}

#[test]
fn criterion_gets_only_what_it_knows() {
    let cli = parse("--bench --iters 3 --save-baseline a --sample-size 12 x --model y");
    let arguments = cli.criterion.to_arguments(cli.filter.as_deref());
    assert_eq!(
        arguments.join(" "),
        "--bench --save-baseline=a --format=pretty --sample-size=12 --color=auto \
         --output-format=criterion -- x"
    );
}
