//! What `OpenAI`'s bodies may say, and what of it can be done here.
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::{errors::ApiError, worker::pb};

#[derive(Deserialize)]
#[serde(untagged, expecting = "a string, a list of strings, a list of token ids, or a list of such lists")]
pub enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    #[serde(default)]
    pub include_usage: bool,
    #[serde(default)]
    include_obfuscation: bool,
}

/// The `logprobs` of a completion is a number, that of a chat whether.
#[derive(Deserialize, Clone, Copy)]
#[serde(untagged, expecting = "a number for completions, true or false for chats")]
pub enum Logprobs {
    Many(u32),
    Whether(bool),
}

/// A body of `/v1/completions` or `/v1/chat/completions`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    pub model: String,
    pub prompt: Option<Prompt>,
    pub messages: Option<Vec<Map<String, Value>>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    n: Option<usize>,
    best_of: Option<usize>,
    stop: Option<Stop>,
    seed: Option<i64>,
    logprobs: Option<Logprobs>,
    top_logprobs: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    // vLLM's additions
    top_k: Option<i64>,
    min_p: Option<f64>,
    min_tokens: Option<u32>,
    ignore_eos: Option<bool>,
    stop_token_ids: Option<Vec<u32>>,
    // accepted with the one value that says "nothing"
    echo: Option<bool>,
    suffix: Option<String>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    logit_bias: Option<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    response_format: Option<Value>,
    // accepted, and without meaning here
    #[serde(rename = "user")]
    _user: Option<String>,
    #[serde(rename = "store")]
    _store: Option<bool>,
    #[serde(rename = "metadata")]
    _metadata: Option<Map<String, Value>>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<String>,
    #[serde(rename = "parallel_tool_calls")]
    _parallel_tool_calls: Option<bool>,
}

/// A body as JSON. 400 that names the place for what is none, or isn't accepted.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let parsed = serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let (path, inner) = (e.path().to_string(), e.into_inner());
        let message = format!("the body can't be read: {inner}");
        if inner.is_data() && path != "." { ApiError::param(path, message) } else { ApiError::invalid(message) }
    })?;
    json.end().map_err(|e| ApiError::invalid(format!("the body can't be read: {e}")))?;
    Ok(parsed)
}

fn within<T: PartialOrd + Copy + std::fmt::Display>(name: &str, value: Option<T>, low: T, high: T) -> Result<(), ApiError> {
    match value {
        Some(v) if !(v >= low && v <= high) => Err(ApiError::param(name, format!("{name} is {v}; accepted is {low} to {high}"))),
        _ => Ok(()),
    }
}

/// What a request asks for, checked.
pub struct Asked {
    pub n: usize,
    pub stream: bool,
    pub include_usage: bool,
    pub stops: Vec<String>,
    pub max_tokens: Option<u32>,
    pub params: pb::SamplingParams,
}

impl Request {
    /// Check everything that needs no model. 400 for the first that is wrong.
    pub fn asked(&self) -> Result<Asked, ApiError> {
        let chat = self.messages.is_some();
        within("temperature", self.temperature, 0.0, 2.0)?;
        within("top_p", self.top_p, f64::MIN_POSITIVE, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("top_k", self.top_k, -1, i64::from(u32::MAX))?;
        within("n", self.n, 1, 128)?;
        within("max_tokens", self.max_tokens, 1, u32::MAX)?;
        within("max_completion_tokens", self.max_completion_tokens, 1, u32::MAX)?;
        within("top_logprobs", self.top_logprobs, 0, 20)?;
        let nothing = |name: &str, set: bool| if set { Err(ApiError::param(name, format!("{name} is not supported here"))) } else { Ok(()) };
        nothing("echo", self.echo == Some(true))?;
        nothing("suffix", self.suffix.as_ref().is_some_and(|s| !s.is_empty()))?;
        nothing("presence_penalty", self.presence_penalty.is_some_and(|p| p != 0.0))?;
        nothing("frequency_penalty", self.frequency_penalty.is_some_and(|p| p != 0.0))?;
        nothing("repetition_penalty", self.repetition_penalty.is_some_and(|p| (p - 1.0).abs() > 0.0))?;
        nothing("logit_bias", self.logit_bias.as_ref().is_some_and(|b| !b.is_empty()))?;
        nothing("tools", self.tools.as_ref().is_some_and(|t| !t.is_empty()))?;
        nothing("tool_choice", self.tool_choice.as_ref().is_some_and(|t| !t.is_null() && t != "none" && t != "auto"))?;
        nothing("response_format", self.response_format.as_ref().is_some_and(|f| !f.is_null() && f["type"] != "text"))?;
        nothing("best_of", self.best_of.is_some_and(|b| b != self.n.unwrap_or(1)))?;
        nothing("stream_options.include_obfuscation", self.stream_options.as_ref().is_some_and(|o| o.include_obfuscation))?;
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::param("stream_options", "stream_options is for requests with \"stream\": true"));
        }
        let stops = match &self.stop {
            None => vec![],
            Some(Stop::One(s)) => vec![s.clone()],
            Some(Stop::Many(many)) => many.clone(),
        };
        if stops.len() > 16 || stops.iter().any(String::is_empty) {
            return Err(ApiError::param("stop", "accepted are at most 16 stop texts, none of them empty"));
        }
        let logprobs = match (self.logprobs, chat) {
            (None | Some(Logprobs::Whether(false)), _) if self.top_logprobs.unwrap_or(0) == 0 => None,
            (Some(Logprobs::Whether(true)), true) => Some(self.top_logprobs.unwrap_or(0)),
            (Some(Logprobs::Many(k)), false) if k <= 20 && self.top_logprobs.is_none() => Some(k),
            (_, true) => return Err(ApiError::param("logprobs", "accepted are true and false, and top_logprobs only with true")),
            (_, false) => return Err(ApiError::param("logprobs", "accepted is 0 to 20")),
        };
        let params = pb::SamplingParams {
            max_tokens: None,
            temperature: Some(self.temperature.unwrap_or(1.0)),
            top_k: self.top_k.map(|k| u32::try_from(k).unwrap_or(0)),
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed.map(|s| s.cast_unsigned() & i64::MAX.cast_unsigned()),
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: self.ignore_eos,
            min_tokens: self.min_tokens,
            logprobs,
        };
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        let include_usage = self.stream_options.as_ref().is_some_and(|o| o.include_usage);
        Ok(Asked { n: self.n.unwrap_or(1), stream, include_usage, stops, max_tokens, params })
    }
}
