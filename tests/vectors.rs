//! What vLLM 0.33's own code answers for cases, jitter and batches, and where this project is stricter.

use forward_bench::batch::{Batch, BatchError, BatchPlan, KvGroup, Limits};
use forward_bench::case::Case;
use serde::Deserialize;

/// Texts that vLLM accepts and this project refuses, and a part of the message.
const STRICTER: [(&str, &str); 2] = [("=8", "the name before `=` is empty"), ("a=0*1@8", "0 times")];

#[derive(Deserialize)]
struct Vectors {
    cases: Vec<CaseVector>,
    jitter: Vec<JitterVector>,
    batches: Vec<BatchVector>,
}

#[derive(Deserialize)]
struct CaseVector {
    text: String,
    ok: bool,
    #[serde(default)]
    name: String,
    #[serde(default)]
    num_tokens: u64,
    #[serde(default)]
    requests: Vec<RequestVector>,
}

#[derive(Deserialize, Debug, PartialEq)]
struct RequestVector {
    query_len: u32,
    kv_len: u32,
    num_draft_tokens: u32,
    chunked: bool,
    prefix_len: u32,
    is_decode: bool,
    prefix_hit: bool,
}

#[derive(Deserialize)]
struct JitterVector {
    text: String,
    jitter: f64,
    max_kv_len: u32,
    seed: u64,
    #[serde(default)]
    error: bool,
    #[serde(default)]
    kv_lens: Vec<u32>,
}

#[derive(Deserialize)]
struct BatchVector {
    text: String,
    groups: Vec<GroupVector>,
    num_kv_blocks: u32,
    lookahead: u32,
    #[serde(default)]
    error: bool,
    #[serde(default)]
    num_tokens: u64,
    #[serde(default)]
    blocks_used: u64,
    #[serde(default)]
    requests: Vec<ScheduleVector>,
}

#[derive(Deserialize)]
struct GroupVector {
    block_size: u32,
    window: Option<u32>,
    replay: Option<u32>,
}

#[derive(Deserialize, Debug, PartialEq)]
struct ScheduleVector {
    block_ids: Vec<Vec<u64>>,
    num_computed_tokens: u32,
    num_prompt_tokens: u32,
    scheduled: u32,
    is_decode: bool,
    num_spec_tokens: u32,
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("data/vllm-0.33-forward.json")).expect("the vectors")
}

#[test]
fn cases_parse_as_in_vllm_apart_from_the_stricter_rules() {
    let mut stricter = 0;
    for vector in vectors().cases {
        let parsed = vector.text.parse::<Case>();
        if let Some((_, part)) = STRICTER.iter().find(|(text, _)| *text == vector.text) {
            assert!(vector.ok, "{:?} is listed as stricter", vector.text);
            let message = parsed.expect_err(&vector.text).to_string();
            assert!(message.contains(part), "{message}");
            stricter += 1;
            continue;
        }
        assert_eq!(parsed.is_ok(), vector.ok, "{:?}: {parsed:?}", vector.text);
        let Ok(case) = parsed else { continue };
        assert_eq!(case.name, vector.name);
        assert_eq!(case.num_tokens().0, vector.num_tokens);
        let requests = case.requests.iter().map(|request| RequestVector {
            query_len: request.query_len,
            kv_len: request.kv_len,
            num_draft_tokens: request.num_draft_tokens,
            chunked: request.chunked,
            prefix_len: request.prefix_len(),
            is_decode: request.is_decode(),
            prefix_hit: request.is_prefix_hit(),
        });
        assert_eq!(requests.collect::<Vec<_>>(), vector.requests, "{:?}", vector.text);
        assert_eq!(case.to_string().parse().as_ref(), Ok(&case));
    }
    assert_eq!(stricter, STRICTER.len());
}

#[test]
fn jitter_draws_the_lengths_that_vllm_draws() {
    for vector in vectors().jitter {
        let case: Case = vector.text.parse().expect(&vector.text);
        let drawn = case.with_jitter(vector.jitter, vector.seed, vector.max_kv_len);
        if vector.error {
            let message = drawn.expect_err(&vector.text).to_string();
            assert!(message.contains("--max-model-len"), "{message}");
            continue;
        }
        let drawn = drawn.expect(&vector.text);
        let kv_lens: Vec<u32> = drawn.requests.iter().map(|request| request.kv_len).collect();
        assert_eq!(kv_lens, vector.kv_lens, "{:?}", vector.text);
    }
}

#[test]
fn batches_have_the_blocks_and_tokens_of_vllms() {
    for vector in vectors().batches {
        let case: Case = vector.text.parse().expect(&vector.text);
        let groups: Vec<KvGroup> = vector
            .groups
            .iter()
            .map(|group| KvGroup { block_size: group.block_size, window: group.window, replay: group.replay })
            .collect();
        let plan = BatchPlan::new(&case, &groups, vector.lookahead);
        let limits = Limits {
            num_kv_blocks: vector.num_kv_blocks,
            max_num_batched_tokens: 8192,
            max_num_seqs: 64,
            max_model_len: 8192,
            num_speculative_tokens: 3,
        };
        let built = Batch::build(&plan, &limits, 0, 32_000);
        if vector.error {
            assert!(matches!(built, Err(BatchError::Blocks { .. })), "{:?}: {built:?}", vector.text);
            continue;
        }
        let batch = built.expect(&vector.text);
        batch.check(&case, &groups, vector.lookahead).expect(&vector.text);
        assert_eq!(plan.num_tokens().0, vector.num_tokens, "{:?}", vector.text);
        assert_eq!(batch.num_tokens() as u64, vector.num_tokens, "{:?}", vector.text);
        assert_eq!(plan.blocks_used(), vector.blocks_used, "{:?}", vector.text);
        let schedules = plan.schedules.iter().map(|schedule| ScheduleVector {
            block_ids: schedule.blocks.iter().map(|run| run.block_ids().collect()).collect(),
            num_computed_tokens: schedule.computed,
            num_prompt_tokens: schedule.num_prompt_tokens(),
            scheduled: schedule.scheduled,
            is_decode: schedule.is_decode,
            num_spec_tokens: schedule.request.num_draft_tokens,
        });
        assert_eq!(schedules.collect::<Vec<_>>(), vector.requests, "{:?}", vector.text);
    }
}
