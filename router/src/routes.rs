//! The HTTP side: paths, keys, bodies in and events out.
use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Request as HttpRequest, State as AxumState},
    http::{HeaderValue, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    routing::{get, post},
};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::{
    State,
    answers::{self, Part, Trace, logprobs},
    errors::ApiError,
    openai::{Asked, Prompt, Request, parse},
    worker::pb::ModelInfo,
};

type App = AxumState<Arc<State>>;

/// A request's id: the client's if it is printable and short, else a new one.
#[derive(Clone)]
struct RequestId(String);

pub fn router(state: Arc<State>) -> Router {
    let keyed = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/tokenize", post(tokenize))
        .route_layer(from_fn_with_state(state.clone(), authorize));
    Router::new()
        .merge(keyed)
        .route("/health", get(async || "ok"))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .fallback(async || ApiError::not_found("such path"))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(axum::middleware::from_fn(identify))
        .with_state(state)
}

async fn identify(mut request: HttpRequest, next: Next) -> Response {
    let given = request.headers().get("x-request-id").and_then(|v| v.to_str().ok()).filter(|v| !v.is_empty() && v.len() <= 128);
    let id = given.map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned);
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

async fn authorize(AxumState(state): App, request: HttpRequest, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).and_then(|v| v.strip_prefix("Bearer "));
    let digest = Sha256::digest(given.unwrap_or_default());
    let known = state.keys.iter().fold(0, |any, key| any | key.ct_eq(digest.as_slice()).unwrap_u8()); // all are compared, however early one fits
    if state.keys.is_empty() || (given.is_some() && known == 1) { next.run(request).await } else { ApiError::unauthorized().into_response() }
}

/// A request's body and id. 413 for a body that is too large; it is read to its end all the same, so that the client reads the answer.
async fn read(state: &State, request: HttpRequest) -> Result<(String, Vec<u8>), ApiError> {
    let id = request.extensions().get::<RequestId>().map(|r| r.0.clone()).unwrap_or_default();
    let (mut body, mut all, mut size) = (request.into_body().into_data_stream(), Vec::new(), 0);
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|_| ApiError::invalid("the body ended too early"))?;
        size += chunk.len();
        if size <= state.options.max_body {
            all.extend_from_slice(&chunk);
        } else if size > 64 << 20 {
            break;
        }
    }
    if size > state.options.max_body { Err(ApiError::too_large(state.options.max_body)) } else { Ok((id, all)) }
}

async fn ready(AxumState(state): App) -> Response {
    if state.workers.ready() > 0 { "ready".into_response() } else { ApiError::unavailable().into_response() }
}

async fn metrics(AxumState(state): App) -> Response {
    metrics::gauge!("dispatch_router_ready_model_servers").set(state.workers.ready() as f64);
    metrics::gauge!("dispatch_router_requests_under_way").set((state.options.max_concurrency - state.permits.available_permits()) as f64);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], state.metrics.render()).into_response()
}

fn card(state: &State, info: &ModelInfo) -> Value {
    json!({"id": state.name(info), "object": "model", "created": state.started, "owned_by": "dispatch", "max_model_len": info.max_model_len})
}

async fn models(AxumState(state): App) -> Result<Json<Value>, ApiError> {
    let info = state.workers.info().ok_or_else(ApiError::unavailable)?;
    Ok(Json(json!({"object": "list", "data": [card(&state, &info)]})))
}

async fn model(AxumState(state): App, axum::extract::Path(asked): axum::extract::Path<String>) -> Result<Json<Value>, ApiError> {
    let info = state.workers.info().ok_or_else(ApiError::unavailable)?;
    known(&state, &info, &asked)?;
    Ok(Json(card(&state, &info)))
}

fn known(state: &State, info: &ModelInfo, asked: &str) -> Result<(), ApiError> {
    let served = state.name(info);
    if asked == served { Ok(()) } else { Err(ApiError::model_not_found(&asked.chars().take(100).collect::<String>(), &served)) }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokenize {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<serde_json::Map<String, Value>>>,
}

async fn tokenize(AxumState(state): App, request: HttpRequest) -> Result<Json<Value>, ApiError> {
    let (_, body) = read(&state, request).await?;
    let asked: Tokenize = parse(&body)?;
    let info = state.workers.info().ok_or_else(ApiError::unavailable)?;
    if let Some(model) = &asked.model {
        known(&state, &info, model)?;
    }
    let ids = match (&asked.prompt, asked.messages) {
        (Some(text), None) => begin(&state, &info, text)?,
        (None, Some(messages)) => conversation(&state, &info, messages)?,
        _ => return Err(ApiError::invalid("accepted is one of prompt and messages")),
    };
    Ok(Json(json!({"tokens": ids, "count": ids.len(), "max_model_len": info.max_model_len})))
}

fn encode(state: &State, text: &str) -> Result<Vec<u32>, ApiError> {
    state.text.encode(text).map_err(|_| ApiError::invalid("the text can't be tokenized"))
}

/// A text's tokens after the one that begins a text.
fn begin(state: &State, info: &ModelInfo, text: &str) -> Result<Vec<u32>, ApiError> {
    let ids = encode(state, text)?;
    Ok(info.bos_token_id.into_iter().chain(ids).collect())
}

fn conversation(state: &State, info: &ModelInfo, messages: Vec<serde_json::Map<String, Value>>) -> Result<Vec<u32>, ApiError> {
    let Some(template) = &state.chat else {
        return Err(ApiError::invalid("the model has no chat template; use /v1/completions"));
    };
    if messages.is_empty() {
        return Err(ApiError::param("messages", "there are no messages; at least one is needed"));
    }
    let mut plain = Vec::new();
    for (i, mut message) in messages.into_iter().enumerate() {
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(ApiError::param(format!("messages[{i}].role"), "a message needs a role, such as \"user\""));
        }
        let text = match message.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Null) | None => String::new(),
            Some(Value::Array(parts)) if parts.iter().all(|p| p["type"] == "text" && p["text"].is_string()) => {
                parts.iter().filter_map(|p| p["text"].as_str()).collect()
            }
            Some(_) => return Err(ApiError::param(format!("messages[{i}].content"), "accepted is a text, or parts of type text")),
        };
        message.insert("content".into(), text.into());
        plain.push(Value::Object(message));
    }
    let prompt = template.render(&plain)?;
    let ids = encode(state, &prompt)?;
    let begun = ids.first().copied() == info.bos_token_id; // most templates write it themselves
    Ok(info.bos_token_id.into_iter().filter(|_| !begun).chain(ids).collect())
}

async fn completions(AxumState(state): App, request: HttpRequest) -> Result<Response, ApiError> {
    generate(state, request, false).await
}

async fn chat(AxumState(state): App, request: HttpRequest) -> Result<Response, ApiError> {
    generate(state, request, true).await
}

async fn generate(state: Arc<State>, request: HttpRequest, chat: bool) -> Result<Response, ApiError> {
    let (id, body) = read(&state, request).await?;
    let mut trace = Trace::new(&id, if chat { "/v1/chat/completions" } else { "/v1/completions" });
    let answered = answer(&state, &body, &mut trace, chat).await;
    match answered {
        Ok((asked, info, parts, first)) if asked.stream => {
            trace.end(StatusCode::OK);
            Ok(events(Form::new(state, &info, &asked, &id, chat), parts, first, trace))
        }
        Ok((asked, info, parts, first)) => match whole(&Form::new(state, &info, &asked, &id, chat), parts, first, &mut trace).await {
            Ok(body) => {
                trace.end(StatusCode::OK);
                Ok(Json(body).into_response())
            }
            Err(e) => {
                trace.end(e.status);
                Err(e)
            }
        },
        Err(e) => {
            trace.end(e.status);
            Err(e)
        }
    }
}

type Started = (Asked, ModelInfo, Admitted, Part);

/// The parts of a request, and its place among those that are under way.
struct Admitted {
    parts: answers::Parts,
    choices: usize,
    _permit: tokio::sync::OwnedSemaphorePermit,
}

/// Check a request, start it, and wait for its first part, so that what fails at once fails with its own status.
async fn answer(state: &Arc<State>, body: &[u8], trace: &mut Trace, chat: bool) -> Result<Started, ApiError> {
    let mut request: Request = parse(body)?;
    let info = state.workers.info().ok_or_else(ApiError::unavailable)?;
    known(state, &info, &request.model)?;
    let asked = request.asked()?;
    let (prompts, param) = match (request.prompt.take(), request.messages.take(), chat) {
        (Some(Prompt::Text(text)), None, false) => (vec![begin(state, &info, &text)?], "prompt"),
        (Some(Prompt::Texts(texts)), None, false) => (texts.iter().map(|t| begin(state, &info, t)).collect::<Result<_, _>>()?, "prompt"),
        (Some(Prompt::Ids(ids)), None, false) => (vec![ids], "prompt"),
        (Some(Prompt::ManyIds(ids)), None, false) => (ids, "prompt"),
        (None, Some(messages), true) => (vec![conversation(state, &info, messages)?], "messages"),
        (.., true) => return Err(ApiError::param("messages", "a chat needs messages, and no prompt")),
        (.., false) => return Err(ApiError::param("prompt", "a completion needs a prompt, and no messages")),
    };
    let choices = prompts.len() * asked.n;
    if !(1..=128).contains(&choices) {
        return Err(ApiError::param(param, format!("prompts times n are {choices}; accepted are 1 to 128")));
    }
    let mut max_tokens = Vec::new();
    for ids in &prompts {
        if let Some(id) = ids.iter().find(|id| **id >= info.vocab_size) {
            return Err(ApiError::param(param, format!("token {id} is outside the vocabulary of {}", info.vocab_size)));
        }
        if ids.is_empty() {
            return Err(ApiError::param(param, "the prompt has no tokens; at least one is needed"));
        }
        let (n, most) = (ids.len(), info.max_model_len as usize);
        let wanted = asked.max_tokens.map_or(if chat { most.saturating_sub(n).max(1) } else { 16 }, |m| m as usize);
        if n + wanted > most && (asked.max_tokens.is_some() || n >= most) {
            let message = format!("the model holds at most {most} tokens; the prompt has {n}, and {wanted} more were asked for");
            return Err(ApiError::context_length(message, param));
        }
        max_tokens.push(wanted.min(most - n) as u32);
    }
    trace.prompt_tokens = prompts.iter().map(Vec::len).sum();
    let permit = state.permits.clone().try_acquire_owned().map_err(|_| ApiError::overloaded())?;
    let mut parts = answers::start(state, &trace.id, &asked, &prompts, &max_tokens)?;
    let first = parts.next().await.ok_or_else(ApiError::internal)??;
    trace.take(&first);
    Ok((asked, info, Admitted { parts, choices, _permit: permit }, first))
}

/// How a request's answer is written.
struct Form {
    state: Arc<State>,
    id: String,
    model: String,
    created: u64,
    chat: bool,
    logprobs: bool,
    include_usage: bool,
}

impl Form {
    fn new(state: Arc<State>, info: &ModelInfo, asked: &Asked, id: &str, chat: bool) -> Self {
        let (model, id) = (state.name(info), format!("{}-{id}", if chat { "chatcmpl" } else { "cmpl" }));
        Self { state, id, model, created: crate::now(), chat, logprobs: asked.params.logprobs.is_some(), include_usage: asked.include_usage }
    }

    fn body(&self, stream: bool, choices: &Value) -> Value {
        let object = match (self.chat, stream) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        };
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    fn scores(&self, tokens: &[(u32, Option<crate::worker::pb::TokenLogprobs>)], offset: &mut usize) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        logprobs(&self.state, tokens, (!self.chat).then_some(offset))
    }

    /// A chunk of a stream.
    fn chunk(&self, part: &Part, begins: bool, offset: &mut usize) -> Value {
        let mut choice = json!({"index": part.index, "logprobs": self.scores(&part.tokens, offset), "finish_reason": part.finish});
        if self.chat {
            choice["delta"] = if begins { json!({"role": "assistant", "content": part.text}) } else { json!({"content": part.text}) };
        } else {
            choice["text"] = json!(part.text);
        }
        let mut body = self.body(true, &json!([choice]));
        if self.include_usage {
            body["usage"] = Value::Null;
        }
        body
    }
}

/// The whole answer at once.
async fn whole(form: &Form, mut admitted: Admitted, first: Part, trace: &mut Trace) -> Result<Value, ApiError> {
    let mut all: Vec<Part> = (0..admitted.choices).map(|index| Part { index, ..Part::default() }).collect();
    let mut next = Some(first);
    while let Some(part) = next {
        let sum = &mut all[part.index];
        sum.text += &part.text;
        sum.tokens.extend(part.tokens);
        sum.finish = part.finish;
        next = admitted.parts.next().await.transpose()?;
        if let Some(part) = &next {
            trace.take(part);
        }
    }
    let choices: Vec<Value> = all
        .iter()
        .map(|part| {
            let mut choice = json!({"index": part.index, "logprobs": form.scores(&part.tokens, &mut 0), "finish_reason": part.finish});
            if form.chat {
                choice["message"] = json!({"role": "assistant", "content": part.text, "refusal": null});
            } else {
                choice["text"] = json!(part.text);
            }
            choice
        })
        .collect();
    let mut body = form.body(false, &json!(choices));
    body["usage"] = trace.usage();
    Ok(body)
}

/// The answer as it comes: an event a part, usage if it was asked for, and `[DONE]`; a failure is an event with an error, and the last.
fn events(form: Form, mut admitted: Admitted, first: Part, mut trace: Trace) -> Response {
    let stream = async_stream::stream! {
        let (mut begun, mut offsets) = (vec![false; admitted.choices], vec![0; admitted.choices]);
        let mut next: Option<Result<Part, ApiError>> = Some(Ok(first));
        while let Some(part) = next {
            match part {
                Ok(part) => {
                    let begins = !std::mem::replace(&mut begun[part.index], true);
                    if begins || !part.text.is_empty() || part.finish.is_some() || form.logprobs {
                        yield form.chunk(&part, begins, &mut offsets[part.index]).to_string();
                    }
                }
                Err(e) => {
                    trace.end(e.status);
                    yield e.body().to_string();
                    return;
                }
            }
            next = admitted.parts.next().await;
            if let Some(Ok(part)) = &next { trace.take(part); }
        }
        if form.include_usage {
            let mut body = form.body(true, &json!([]));
            body["usage"] = trace.usage();
            yield body.to_string();
        }
        yield "[DONE]".to_owned();
    };
    let events = stream.map(|data| Ok::<_, Infallible>(Event::default().data(data)));
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))).into_response()
}
