//! `OpenAI`'s HTTP API in front of model servers: tokenizes, validates, admits, balances and detokenizes. Only token ids go to a server.
mod answers;
mod chat;
mod errors;
mod openai;
mod routes;
mod text;
mod worker;

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use sha2::{Digest, Sha256};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
};
use tracing_subscriber::EnvFilter;

/// Serve `OpenAI`'s API in front of dispatch model servers.
#[derive(Parser)]
#[command(version, about)]
pub struct Options {
    /// The checkpoint's folder: its tokenizer and chat template.
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    /// A model server; repeat for several.
    #[arg(long = "worker", value_name = "URL", default_value = "http://127.0.0.1:50051")]
    workers: Vec<String>,
    /// Where to listen; port 0 takes any that is free.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// What requests must name as their model [default: the servers' name]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// A file of API keys, one a line; `DISPATCH_API_KEYS` may hold some, too, with commas between. None at all: no key is asked for.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Requests under way at most; more are answered with 429.
    #[arg(long, default_value_t = 1024)]
    max_concurrency: usize,
    /// Bytes of a body at most.
    #[arg(long, default_value_t = 4 << 20)]
    max_body: usize,
    /// Seconds that an answer may take.
    #[arg(long, default_value_t = 600.0)]
    request_timeout: f64,
    /// Seconds that a stop waits for answers under way.
    #[arg(long, default_value_t = 30.0)]
    drain_timeout: f64,
}

/// What every request needs.
pub struct State {
    options: Options,
    workers: worker::Workers,
    text: text::Text,
    chat: Option<chat::Chat>,
    keys: Vec<[u8; 32]>, // SHA-256
    permits: Arc<Semaphore>,
    metrics: PrometheusHandle,
    started: u64,
}

impl State {
    /// What the model is called here.
    fn name(&self, info: &worker::pb::ModelInfo) -> String {
        self.options.served_model_name.clone().unwrap_or_else(|| info.model_name.clone())
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn keys(file: Option<&PathBuf>) -> Result<Vec<[u8; 32]>> {
    let mut found = std::env::var("DISPATCH_API_KEYS").unwrap_or_default().replace(',', "\n");
    if let Some(path) = file {
        found += "\n";
        found += &std::fs::read_to_string(path).with_context(|| format!("--api-key-file {} can't be read", path.display()))?;
    }
    let keys: Vec<_> = found.lines().map(str::trim).filter(|k| !k.is_empty()).map(|k| Sha256::digest(k).into()).collect();
    if file.is_some() && keys.is_empty() {
        bail!("--api-key-file holds no key; accepted is one a line");
    }
    Ok(keys)
}

fn recorder() -> Result<PrometheusHandle> {
    let times = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
    let handle = PrometheusBuilder::new().set_buckets(&times)?.install_recorder()?;
    metrics::describe_counter!("dispatch_router_requests_total", "Requests that ended, by path and status.");
    metrics::describe_histogram!("dispatch_router_request_duration_seconds", "From a request's arrival to its last byte.");
    metrics::describe_histogram!("dispatch_router_time_to_first_token_seconds", "From a request's arrival to its first token.");
    metrics::describe_counter!("dispatch_router_prompt_tokens_total", "Tokens of prompts.");
    metrics::describe_counter!("dispatch_router_completion_tokens_total", "Tokens of answers.");
    metrics::describe_gauge!("dispatch_router_ready_model_servers", "Model servers that serve.");
    metrics::describe_gauge!("dispatch_router_requests_under_way", "Requests that are being answered.");
    Ok(handle)
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse();
    let filter = EnvFilter::try_from_env("DISPATCH_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().flatten_event(true).with_target(false).with_env_filter(filter).with_writer(std::io::stderr).init();
    let state = Arc::new(State {
        text: text::Text::load(&options.model)?,
        chat: chat::Chat::load(&options.model)?,
        keys: keys(options.api_key_file.as_ref())?,
        workers: worker::Workers::connect(&options.workers)?,
        permits: Arc::new(Semaphore::new(options.max_concurrency)),
        metrics: recorder()?,
        started: now(),
        options,
    });
    let listener = TcpListener::bind(state.options.listen).await.with_context(|| format!("{} can't be listened on", state.options.listen))?;
    tracing::info!(listen = %listener.local_addr()?, "ready");
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = axum::serve(listener, routes::router(state.clone())).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    let mut serving = tokio::spawn(serving.into_future());
    tokio::select! { _ = term.recv() => {}, _ = int.recv() => {}, end = &mut serving => return Ok(end??) }
    tracing::info!("draining");
    let _ = stop.send(());
    let limit = Duration::from_secs_f64(state.options.drain_timeout);
    tokio::select! { _ = &mut serving => {}, () = tokio::time::sleep(limit) => {}, _ = term.recv() => {}, _ = int.recv() => {} }
    tracing::info!("stopped");
    Ok(())
}
