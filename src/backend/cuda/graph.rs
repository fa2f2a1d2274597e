//! CUDA graphs: work of the stream, recorded once and launched as a whole.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::error::driver;
use super::gpu::Gpu;
use crate::backend::BackendError;

/// A graph that is ready to be launched. It keeps no buffer or kernel alive: those must outlive it.
pub(super) struct Graph {
    exec: sys::CUgraphExec,
    gpu: Arc<Gpu>,
}

impl Graph {
    /// Records what `body` puts on the stream. `body` may not allocate, free, copy from or to the host, or wait.
    pub(super) fn record(
        gpu: &Arc<Gpu>,
        body: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        gpu.bind()?;
        let stream = gpu.stream.cu_stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not the default one.
        unsafe { result::stream::begin_capture(stream, mode) }.map_err(driver("starting a capture"))?;
        let recorded = body();
        // SAFETY: a capture is going on, begun above. It is ended even if `body` failed.
        let ended = unsafe { result::stream::end_capture(stream) };
        let graph = match (recorded, ended) {
            (Ok(()), ended) => ended.map_err(driver("ending a capture"))?,
            (Err(error), ended) => {
                if let Ok(graph) = ended {
                    destroy(graph);
                }
                return Err(error);
            }
        };
        let mut exec = std::ptr::null_mut();
        // SAFETY: a whole graph; one handle is written.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) };
        destroy(graph); // the executable graph has its own copy
        status.result().map_err(driver("instantiating a graph"))?;
        let graph = Self { exec, gpu: gpu.clone() };
        // SAFETY: graph and stream are alive.
        unsafe { result::graph::upload(graph.exec, stream) }.map_err(driver("uploading a graph"))?;
        Ok(graph)
    }

    /// Puts the whole graph on the stream.
    pub(super) fn launch(&self) -> Result<(), BackendError> {
        self.gpu.bind()?;
        // SAFETY: the graph is alive, and its owner keeps alive what it uses.
        unsafe { result::graph::launch(self.exec, self.gpu.stream.cu_stream()) }
            .map_err(driver("launching a graph"))
    }
}

fn destroy(graph: sys::CUgraph) {
    if !graph.is_null() {
        // SAFETY: a graph that the capture gave us, destroyed once.
        let _ = unsafe { result::graph::destroy(graph) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        let _ = self.gpu.stream.synchronize();
        // SAFETY: not running any more, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}
