//! The checkpoint's own chat template, rendered as Hugging Face renders it.
use std::path::Path;

use anyhow::{Context, Result};
use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig, value::Serde};
use serde_json::Value as Json;

use crate::errors::ApiError;

/// A chat template and the tokens that it may name.
pub struct Chat {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// A special token's text: a string, or an object with `content`.
fn token_text(config: &Json, name: &str) -> String {
    let token = &config[name];
    token.as_str().or_else(|| token["content"].as_str()).unwrap_or_default().to_owned()
}

impl Chat {
    /// A folder's template: `chat_template.jinja`, or the one in `tokenizer_config.json`; None where it has none.
    pub fn load(folder: &Path) -> Result<Option<Self>> {
        let config = match std::fs::read_to_string(folder.join("tokenizer_config.json")) {
            Ok(text) => serde_json::from_str(&text).context("tokenizer_config.json is no JSON")?,
            Err(_) => Json::Null,
        };
        let named = |all: &Vec<Json>| all.iter().find(|t| t["name"] == "default").and_then(|t| t["template"].as_str().map(str::to_owned));
        let source = std::fs::read_to_string(folder.join("chat_template.jinja")).ok();
        let source = source.or_else(|| config["chat_template"].as_str().map(str::to_owned)).or_else(|| config["chat_template"].as_array().and_then(named));
        let Some(source) = source else { return Ok(None) };
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(Error::new(ErrorKind::InvalidOperation, message)) });
        environment.add_template_owned("chat", source).context("the chat template can't be read")?;
        Ok(Some(Self { environment, bos: token_text(&config, "bos_token"), eos: token_text(&config, "eos_token") }))
    }

    /// The prompt of a conversation; its special tokens are in it as text.
    pub fn render(&self, messages: &[Json]) -> Result<String, ApiError> {
        let values = context! { messages => Value::from(Serde(messages)), add_generation_prompt => true, bos_token => self.bos.as_str(), eos_token => self.eos.as_str() };
        let template = self.environment.get_template("chat").map_err(|_| ApiError::internal())?;
        template.render(values).map_err(|e| {
            // what a template says on purpose is for the user; the rest may hold a part of a message
            let said = if e.kind() == ErrorKind::InvalidOperation { e.detail() } else { None };
            ApiError::param("messages", format!("the model's chat template refuses these messages: {}", said.unwrap_or("it can't be rendered")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chat(template: &str) -> Chat {
        let folder = std::env::temp_dir().join(format!("dispatch-chat-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = json!({"chat_template": template, "bos_token": {"content": "<bos>"}, "eos_token": "<eos>"});
        std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
        let chat = Chat::load(&folder).unwrap().unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        chat
    }

    #[test]
    fn the_published_form_of_deepseek_moe() {
        let c = chat(
            "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}{% for message in messages %}\
             {% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}\
             {{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}\
             {% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        );
        let messages = [json!({"role": "user", "content": "Hi"}), json!({"role": "assistant", "content": "Yes"}), json!({"role": "user", "content": "Go"})];
        assert_eq!(c.render(&messages).unwrap(), "<bos>User: Hi\n\nAssistant: Yes<eos>User: Go\n\nAssistant:");
    }

    #[test]
    fn python_methods_and_refusals() {
        let c = chat("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content.strip() }}{% endfor %}");
        assert_eq!(c.render(&[json!({"role": "user", "content": "  a "})]).unwrap(), "a");
        assert!(c.render(&[json!({"role": "tool", "content": "x"})]).unwrap_err().message.ends_with("no tools"));
    }
}
