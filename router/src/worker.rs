//! Model servers: one stream to each, kept open; a request goes to the one with the fewest under way.
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, bail};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::errors::ApiError;

pub mod pb {
    #![allow(clippy::pedantic)]
    tonic::include_proto!("dispatch.v1");
}
use pb::{Command, GenerateRequest, GetModelInfoRequest, ModelInfo, Output, command, engine_client::EngineClient, error::Code, output::End};

type Sinks = Arc<Mutex<HashMap<String, UnboundedSender<Output>>>>; // by request id

/// An open stream to a model server.
#[derive(Clone)]
struct Line {
    commands: UnboundedSender<Command>,
    sinks: Sinks,
}

/// One model server.
struct Worker {
    index: usize,
    channel: Channel,
    line: RwLock<Option<Line>>, // None while it can't be reached
    serving: AtomicBool,        // what its health service says
    under_way: AtomicUsize,
}

impl Worker {
    /// Connect, listen until the stream breaks, and again.
    async fn run(self: Arc<Self>, info: Arc<RwLock<Option<ModelInfo>>>) {
        loop {
            let end = self.listen(&info).await;
            self.serving.store(false, Ordering::Relaxed);
            if self.line.write().unwrap().take().is_some() {
                tracing::warn!(worker = self.index, "a model server is gone");
            }
            tracing::debug!(worker = self.index, failed = end.is_err(), "trying again");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    async fn healthy(&self) -> bool {
        let asked = HealthCheckRequest { service: "dispatch.v1.Engine".into() };
        let mut client = HealthClient::new(self.channel.clone());
        let answer = tokio::time::timeout(Duration::from_secs(5), client.check(asked)).await;
        matches!(answer, Ok(Ok(a)) if a.get_ref().status() == ServingStatus::Serving)
    }

    async fn listen(&self, info: &RwLock<Option<ModelInfo>>) -> Result<()> {
        if !self.healthy().await {
            bail!("not serving");
        }
        let mut client = EngineClient::new(self.channel.clone()).max_decoding_message_size(64 << 20);
        let told = client.get_model_info(GetModelInfoRequest {}).await?.into_inner();
        if let Some(known) = info.read().unwrap().as_ref()
            && (known.vocab_size, known.max_model_len) != (told.vocab_size, told.max_model_len)
        {
            tracing::error!(worker = self.index, "this model server has another model than the others; it gets no requests");
            bail!("another model");
        }
        *info.write().unwrap() = Some(told);
        let (commands, asked) = unbounded_channel();
        let mut answers = client.generate(UnboundedReceiverStream::new(asked)).await?.into_inner();
        let sinks = Sinks::default();
        *self.line.write().unwrap() = Some(Line { commands, sinks: sinks.clone() });
        self.serving.store(true, Ordering::Relaxed);
        tracing::info!(worker = self.index, "a model server is ready");
        let mut check = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                message = answers.message() => match message? {
                    None => return Ok(()),
                    Some(m) => {
                        let mut sinks = sinks.lock().unwrap();
                        for output in m.outputs {
                            let sink = if output.end.is_some() { sinks.remove(&output.request_id) } else { sinks.get(&output.request_id).cloned() };
                            if let Some(sink) = sink { let _ = sink.send(output); } // one that nobody waits for was just aborted
                        }
                    }
                },
                _ = check.tick() => self.serving.store(self.healthy().await, Ordering::Relaxed),
            }
        }
    }
}

/// A request that is under way. Dropped before its end, it is aborted.
pub struct Answer {
    worker: Arc<Worker>,
    line: Line,
    id: String,
    outputs: UnboundedReceiver<Output>,
    over: bool,
}

impl Answer {
    /// The next part. An error for one that the server refuses, and where the server is gone.
    pub async fn next(&mut self) -> Result<Output, ApiError> {
        let Some(output) = self.outputs.recv().await else {
            self.over = true;
            return Err(ApiError::unavailable());
        };
        self.over = output.end.is_some();
        match output.end {
            Some(End::Error(e)) => Err(match e.code() {
                Code::InvalidArgument => ApiError::invalid(e.message),
                Code::ResourceExhausted => ApiError::overloaded(),
                Code::Unavailable | Code::Unspecified => ApiError::unavailable(),
            }),
            _ => Ok(output),
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.worker.under_way.fetch_sub(1, Ordering::Relaxed);
        if !self.over {
            self.line.sinks.lock().unwrap().remove(&self.id);
            let abort = pb::AbortRequest { request_id: self.id.clone() };
            let _ = self.line.commands.send(Command { command: Some(command::Command::Abort(abort)) }); // a server that is gone aborts by itself
        }
    }
}

/// All model servers.
pub struct Workers {
    all: Vec<Arc<Worker>>,
    info: Arc<RwLock<Option<ModelInfo>>>,
}

impl Workers {
    /// Watch servers at these addresses, such as `http://127.0.0.1:50051`. An error for what is no address.
    pub fn connect(addresses: &[String]) -> Result<Self> {
        let info = Arc::new(RwLock::new(None));
        let mut all = Vec::new();
        for (index, address) in addresses.iter().enumerate() {
            let endpoint =
                Endpoint::from_shared(address.clone()).map_err(|_| anyhow::anyhow!("--worker {address:?} is no address; accepted is http://HOST:PORT"))?;
            let channel = endpoint.connect_timeout(Duration::from_secs(5)).tcp_nodelay(true).connect_lazy();
            let worker = Arc::new(Worker { index, channel, line: RwLock::default(), serving: AtomicBool::new(false), under_way: AtomicUsize::new(0) });
            tokio::spawn(worker.clone().run(info.clone()));
            all.push(worker);
        }
        Ok(Self { all, info })
    }

    /// What the servers say of their model; None while none was reached.
    pub fn info(&self) -> Option<ModelInfo> {
        self.info.read().unwrap().clone()
    }

    /// How many serve.
    pub fn ready(&self) -> usize {
        self.all.iter().filter(|w| w.serving.load(Ordering::Relaxed)).count()
    }

    /// Send a request to the server with the fewest under way. 503 where none serves.
    pub fn start(&self, request: GenerateRequest) -> Result<Answer, ApiError> {
        let serving = self.all.iter().filter(|w| w.serving.load(Ordering::Relaxed));
        let worker = serving.min_by_key(|w| w.under_way.load(Ordering::Relaxed)).ok_or_else(ApiError::unavailable)?;
        let line = worker.line.read().unwrap().clone().ok_or_else(ApiError::unavailable)?;
        let (id, (sink, outputs)) = (request.request_id.clone(), unbounded_channel());
        line.sinks.lock().unwrap().insert(id.clone(), sink);
        worker.under_way.fetch_add(1, Ordering::Relaxed);
        let answer = Answer { worker: worker.clone(), line, id, outputs, over: false };
        let command = Command { command: Some(command::Command::Generate(request)) };
        answer.line.commands.send(command).map_err(|_| ApiError::unavailable())?;
        Ok(answer)
    }
}
