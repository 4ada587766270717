//! A request's choices, from prompts to texts: one engine request each, told apart by their index.
use std::{pin::Pin, sync::Arc, time::Instant};

use axum::http::StatusCode;
use futures::{Stream, stream::SelectAll};
use serde_json::{Value, json};
use tokio::time::{Duration, timeout_at};

use crate::{
    State,
    errors::ApiError,
    openai::Asked,
    text::AnswerText,
    worker::pb::{Finished, GenerateRequest, TokenLogprobs, output::End},
};

/// What a step added to a choice.
#[derive(Default)]
pub struct Part {
    pub index: usize,
    pub text: String,
    pub tokens: Vec<(u32, Option<TokenLogprobs>)>,
    pub finish: Option<&'static str>,
    pub spans: Option<Finished>, // what the server says at the end; a stop text ends an answer before
}

pub type Parts = SelectAll<Pin<Box<dyn Stream<Item = Result<Part, ApiError>> + Send>>>;

/// Send a request's prompts to model servers, `n` times each, and give their parts as they come. Dropping it aborts what is under way.
pub fn start(state: &Arc<State>, id: &str, asked: &Asked, prompts: &[Vec<u32>], max_tokens: &[u32]) -> Result<Parts, ApiError> {
    let mut parts = Parts::new();
    for index in 0..prompts.len() * asked.n {
        let mut params = asked.params.clone();
        params.max_tokens = Some(max_tokens[index / asked.n]);
        params.min_tokens = params.min_tokens.map(|m| m.min(max_tokens[index / asked.n]));
        params.seed = params.seed.map(|s| (s + (index % asked.n) as u64) & i64::MAX.cast_unsigned()); // choices of one prompt differ
        let request = GenerateRequest { request_id: format!("{id}-{index}"), prompt_ids: prompts[index / asked.n].clone(), sampling_params: Some(params) };
        let mut answer = state.workers.start(request)?;
        let mut text = AnswerText::new(&state.text, asked.stops.clone());
        let until = tokio::time::Instant::now() + Duration::from_secs_f64(state.options.request_timeout);
        parts.push(Box::pin(async_stream::try_stream! {
            loop {
                let output = timeout_at(until, answer.next()).await.map_err(|_| ApiError::timeout())??;
                let mut logprobs = output.logprobs.into_iter();
                let mut part = Part { index, ..Part::default() };
                for token in output.token_ids {
                    part.tokens.push((token, logprobs.next()));
                    let (more, over) = text.push(token);
                    part.text += &more;
                    if over {
                        part.finish = Some("stop");
                        break;
                    }
                }
                if let (None, Some(End::Finished(end))) = (part.finish, output.end) {
                    let (more, over) = text.rest();
                    part.text += &more;
                    part.finish = Some(if over || end.reason == "stop" { "stop" } else { "length" });
                    if end.reason == "abort" { Err(ApiError::unavailable())?; }
                    part.spans = Some(end);
                }
                let over = part.finish.is_some();
                yield part;
                if over { break; }
            }
        }));
    }
    Ok(parts)
}

/// Log probabilities in the form of chats, or with `offset` (characters of the answer before) in that of completions.
pub fn logprobs(state: &State, tokens: &[(u32, Option<TokenLogprobs>)], offset: Option<&mut usize>) -> Value {
    let text_of = |id: u32| String::from_utf8_lossy(&state.text.token_bytes(id)).into_owned();
    let scored = || tokens.iter().filter_map(|(t, l)| l.as_ref().map(|l| (*t, l)));
    let finite = |p: f32| if p.is_finite() { f64::from(p) } else { -9999.0 };
    let top = |l: &TokenLogprobs| l.top_ids.iter().copied().zip(l.top_logprobs.iter().map(|p| finite(*p))).collect::<Vec<_>>();
    if let Some(offset) = offset {
        let texts: Vec<String> = scored().map(|(t, _)| text_of(t)).collect();
        let offsets: Vec<usize> = texts
            .iter()
            .map(|t| {
                let at = *offset;
                *offset += t.chars().count();
                at
            })
            .collect();
        let best: Vec<Value> =
            scored().map(|(_, l)| top(l).into_iter().map(|(t, p)| (text_of(t), json!(p))).collect::<serde_json::Map<_, _>>().into()).collect();
        let own: Vec<f64> = scored().map(|(_, l)| finite(l.logprob)).collect();
        return json!({"tokens": texts, "token_logprobs": own, "top_logprobs": best, "text_offset": offsets});
    }
    let one = |t: u32, p: f64| json!({"token": text_of(t), "logprob": p, "bytes": state.text.token_bytes(t)});
    let content = scored().map(|(t, l)| {
        let mut entry = one(t, finite(l.logprob));
        let best: Vec<Value> = top(l).into_iter().map(|(t, p)| one(t, p)).collect();
        entry["top_logprobs"] = best.into();
        entry
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// What a request cost, told in the log when it is over, however it ends.
pub struct Trace {
    pub id: String,
    pub route: &'static str,
    pub begun: Instant,
    pub status: u16,
    pub ttft: Option<f64>, // seconds
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub spans: Finished,
}

impl Trace {
    pub fn new(id: &str, route: &'static str) -> Self {
        let status = 499; // the client is gone, unless something else is said
        Self { id: id.into(), route, begun: Instant::now(), status, ttft: None, prompt_tokens: 0, completion_tokens: 0, spans: Finished::default() }
    }

    pub fn end(&mut self, status: StatusCode) {
        self.status = status.as_u16();
    }

    pub fn take(&mut self, part: &Part) {
        if self.ttft.is_none() {
            self.ttft = Some(self.begun.elapsed().as_secs_f64());
        }
        self.completion_tokens += part.tokens.len();
        if let Some(spans) = &part.spans {
            self.spans = spans.clone();
        }
    }

    pub fn usage(&self) -> Value {
        let (prompt, completion) = (self.prompt_tokens, self.completion_tokens);
        json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let seconds = self.begun.elapsed().as_secs_f64();
        let ms = |s: f64| (s * 1e5).round() / 100.0;
        tracing::info!(
            request_id = self.id,
            route = self.route,
            status = self.status,
            prompt_tokens = self.prompt_tokens,
            completion_tokens = self.completion_tokens,
            ttft_ms = self.ttft.map(ms),
            total_ms = ms(seconds),
            queue_ms = ms(self.spans.queue_s),
            prefill_ms = ms(self.spans.prefill_s),
            decode_ms = ms(self.spans.decode_s),
            "request"
        );
        metrics::counter!("dispatch_router_requests_total", "route" => self.route, "status" => self.status.to_string()).increment(1);
        metrics::histogram!("dispatch_router_request_duration_seconds", "route" => self.route).record(seconds);
        metrics::counter!("dispatch_router_prompt_tokens_total").increment(self.prompt_tokens as u64);
        metrics::counter!("dispatch_router_completion_tokens_total").increment(self.completion_tokens as u64);
        if let Some(ttft) = self.ttft {
            metrics::histogram!("dispatch_router_time_to_first_token_seconds", "route" => self.route).record(ttft);
        }
    }
}
