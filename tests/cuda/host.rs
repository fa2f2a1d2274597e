//! Collectives between ranks that are threads on one GPU, which NCCL does not serve: made by the host, in eager steps alone.

use std::sync::Arc;

use forward_bench::backend::cuda::custom::cudarc::driver::result;
use forward_bench::backend::cuda::{Collectives, Gpu, Span};
use forward_bench::backend::{BackendError, Communicator, Dtype};
use forward_bench::layout::Group;
use half::{bf16, f16};

use crate::ranks::Threads;

/// Sums in float32 and rank order, rounded once; what moves keeps its bits.
pub struct Host {
    threads: Arc<Threads>,
    members: [usize; 4],
}

/// What crosses the host: numbers, or bits that only look like one.
#[derive(Clone, Copy)]
enum As {
    Numbers,
    Bits,
}

impl Host {
    pub fn new(threads: Arc<Threads>, place: forward_bench::layout::Place) -> Self {
        let groups = [Group::World, Group::Tensor, Group::Data, Group::Expert];
        Self { threads, members: groups.map(|group| place.members(group).len()) }
    }

    fn members(&self, group: Group) -> usize {
        self.members[group as usize]
    }
}

fn failed(error: impl std::fmt::Debug) -> BackendError {
    BackendError::Device(format!("a copy of the test failed: {error:?}"))
}

fn read_words<T: Copy + Default>(gpu: &Gpu, address: u64, count: usize) -> Result<Vec<T>, BackendError> {
    let mut words = vec![T::default(); count];
    // SAFETY: the caller's elements on the device; the stream is waited for before `words` is used.
    unsafe { result::memcpy_dtoh_async(&mut words, address, gpu.stream.cu_stream()) }.map_err(failed)?;
    gpu.synchronize()?;
    Ok(words)
}

fn write_words<T>(gpu: &Gpu, address: u64, words: &[T]) -> Result<(), BackendError> {
    // SAFETY: room for as many on the device; `words` lives until the stream was waited for.
    unsafe { result::memcpy_htod_async(address, words, gpu.stream.cu_stream()) }.map_err(failed)?;
    gpu.synchronize()
}

fn read(gpu: &Gpu, span: Span, what: As) -> Result<Vec<f32>, BackendError> {
    let Span { address, count, dtype } = span;
    if dtype == Dtype::Float32 {
        return read_words(gpu, address, count);
    }
    let words: Vec<u16> = read_words(gpu, address, count)?;
    let widen = |word: u16| match (what, dtype) {
        (As::Bits, _) => f32::from_bits(u32::from(word)),
        (As::Numbers, Dtype::Float16) => f16::from_bits(word).to_f32(),
        (As::Numbers, _) => bf16::from_bits(word).to_f32(),
    };
    Ok(words.into_iter().map(widen).collect())
}

fn write(gpu: &Gpu, (address, dtype): (u64, Dtype), values: &[f32], what: As) -> Result<(), BackendError> {
    if dtype == Dtype::Float32 {
        return write_words(gpu, address, values);
    }
    let narrow = |value: &f32| match (what, dtype) {
        (As::Bits, _) => value.to_bits() as u16,
        (As::Numbers, Dtype::Float16) => f16::from_f32(*value).to_bits(),
        (As::Numbers, _) => bf16::from_f32(*value).to_bits(),
    };
    write_words(gpu, address, &values.iter().map(narrow).collect::<Vec<u16>>())
}

impl Collectives for Host {
    fn all_reduce(&self, gpu: &Gpu, group: Group, data: Span) -> Result<(), BackendError> {
        let mut values = read(gpu, data, As::Numbers)?;
        self.threads.all_reduce(group, &mut values)?;
        write(gpu, (data.address, data.dtype), &values, As::Numbers)
    }

    fn all_gather(&self, gpu: &Gpu, group: Group, mine: Span, all: u64) -> Result<(), BackendError> {
        let values = read(gpu, mine, As::Bits)?;
        let mut gathered = vec![0.0; values.len() * self.members(group)];
        self.threads.all_gather(group, &values, &mut gathered)?;
        write(gpu, (all, mine.dtype), &gathered, As::Bits)
    }

    fn reduce_scatter(&self, gpu: &Gpu, group: Group, all: u64, mine: Span) -> Result<(), BackendError> {
        let whole = Span { address: all, count: mine.count * self.members(group), ..mine };
        let mut values = vec![0.0; mine.count];
        self.threads.reduce_scatter(group, &read(gpu, whole, As::Numbers)?, &mut values)?;
        write(gpu, (mine.address, mine.dtype), &values, As::Numbers)
    }

    fn all_to_all(&self, gpu: &Gpu, group: Group, send: Span, receive: u64) -> Result<(), BackendError> {
        let mut values = vec![0.0; send.count];
        self.threads.all_to_all(group, &read(gpu, send, As::Bits)?, &mut values)?;
        write(gpu, (receive, send.dtype), &values, As::Bits)
    }
}
