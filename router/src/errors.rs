//! Every answer that is no success: `OpenAI`'s `{"error": {message, type, param, code}}`, whatever went wrong and wherever.
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// What a client is told of a failure. Its message never names a worker, a prompt or a key.
#[derive(Debug, Clone)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub message: String,
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None }
    }

    fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// 400: the request can't be answered as it is.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400, naming the parameter that is wrong.
    pub fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid(message) }
    }

    /// 400: prompt and answer don't fit the model.
    pub fn context_length(message: impl Into<String>, param: &str) -> Self {
        Self::param(param, message).coded("context_length_exceeded")
    }

    pub fn unauthorized() -> Self {
        let message = "no valid API key was given; send one as `Authorization: Bearer KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message).coded("invalid_api_key")
    }

    pub fn not_found(what: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("there is no {what} here"))
    }

    pub fn model_not_found(asked: &str, served: &str) -> Self {
        let message = format!("the model {asked:?} does not exist here; accepted is {served:?}");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).coded("model_not_found");
        Self { param: Some("model".into()), ..error }
    }

    pub fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "this path doesn't answer that method")
    }

    pub fn too_large(limit: usize) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", format!("the body is larger than the {limit} bytes that are accepted"))
    }

    pub fn overloaded() -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "too many requests are under way; try again later").coded("rate_limit_exceeded")
    }

    pub fn unavailable() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "no model server is ready; try again later").coded("service_unavailable")
    }

    pub fn timeout() -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", "the answer took longer than is allowed here").coded("timeout")
    }

    pub fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "the router failed; its log says more")
    }

    pub fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
