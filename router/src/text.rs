//! Text to token ids and back: the tokenizer, mended where it is mis-wired, and an answer's text as it grows.
use std::{collections::HashMap, path::Path};

use anyhow::{Context, Result, bail};
use tokenizers::{
    DecodeStream, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer, pre_tokenizers::byte_level::ByteLevel,
};

/// Spaces of several kinds, newlines, code, Chinese, emoji of several code points, combining marks: the samples of
/// `dispatch.model.tokenizer`, so that Rust and Python mend the same tokenizers.
const SAMPLES: [&str; 7] =
    ["Hello, world!", " leading and  double  spaces ", "line\nbreak\n\n\ttab", "def f(x):\n    return x + 1\n", "你好，世界。", "👩🏽‍🚀 and 🇫🇷", "naïve café é"];

/// The first sample that doesn't survive encoding and decoding.
fn lost_text(tokenizer: &Tokenizer) -> Option<&'static str> {
    SAMPLES.into_iter().find(|sample| {
        let back = tokenizer.encode(*sample, false).and_then(|e| tokenizer.decode(e.get_ids(), false));
        back.ok().as_deref() != Some(sample)
    })
}

/// Whether the vocabulary spells bytes: it holds the space and the newline as byte-level BPE writes them, and no `▁` words.
fn is_byte_level(tokenizer: &Tokenizer) -> bool {
    let vocab = tokenizer.get_vocab(false);
    vocab.contains_key("Ġ") && vocab.contains_key("Ċ") && !vocab.keys().any(|t| t.starts_with('▁'))
}

/// A folder's tokenizer, mended if it is a mis-wired byte-level one; an error if text is lost all the same.
pub fn load_tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    if !path.exists() {
        bail!("{} has no tokenizer.json; accepted is a folder with a fast tokenizer's file", folder.display());
    }
    let mut tokenizer = Tokenizer::from_file(&path).map_err(|e| anyhow::anyhow!("{} is no tokenizer: {e}", path.display()))?;
    if lost_text(&tokenizer).is_some() && is_byte_level(&tokenizer) {
        tokenizer.with_decoder(Some(ByteLevel::default()));
        if lost_text(&tokenizer).is_some() {
            tokenizer.with_normalizer(None::<NormalizerWrapper>).map_err(|e| anyhow::anyhow!("{} can't be mended: {e}", path.display()))?;
            tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        }
    }
    match lost_text(&tokenizer) {
        Some(sample) => bail!("{} loses text: {sample:?} comes back as another", path.display()),
        None => Ok(tokenizer),
    }
}

/// The byte that each character of a byte-level vocabulary stands for (GPT-2's table: printable Latin-1 bytes are themselves,
/// the others follow from U+0100 on).
fn byte_of_char() -> HashMap<char, u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = 0x100..;
    (0..=255u8).map(|b| (if printable(b) { char::from(b) } else { char::from_u32(others.next().unwrap()).unwrap() }, b)).collect()
}

/// A tokenizer that lives as long as the process, and the bytes of its tokens.
pub struct Text {
    pub tokenizer: &'static Tokenizer,
    bytes: Option<HashMap<char, u8>>, // where the vocabulary spells bytes
}

impl Text {
    pub fn load(folder: &Path) -> Result<Self> {
        let tokenizer: &'static Tokenizer = Box::leak(Box::new(load_tokenizer(folder).context("the tokenizer can't be used")?));
        let bytes = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))).then(byte_of_char);
        Ok(Self { tokenizer, bytes })
    }

    /// Token ids of a text, without those that the tokenizer would add.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|e| anyhow::anyhow!("{e}"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The bytes that one token stands for; alone they may be half a character.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let token = self.tokenizer.id_to_token(id).unwrap_or_default();
        let special = self.tokenizer.get_added_tokens_decoder().contains_key(&id);
        match &self.bytes {
            Some(byte_of) if !special => token.chars().filter_map(|c| byte_of.get(&c).copied()).collect(),
            Some(_) => token.into_bytes(),
            None => self.tokenizer.decode(&[id], false).unwrap_or(token).into_bytes(),
        }
    }
}

type Stream = DecodeStream<'static, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// An answer's text as its tokens come: never half a character, nor a text that could become a stop text.
pub struct AnswerText {
    tokenizer: &'static Tokenizer,
    stream: Stream,
    pending: Vec<u32>, // since text last came
    held: String,
    stops: Vec<String>,
}

impl AnswerText {
    pub fn new(text: &Text, stops: Vec<String>) -> Self {
        let tokenizer = text.tokenizer;
        Self { tokenizer, stream: tokenizer.decode_stream(true), pending: Vec::new(), held: String::new(), stops }
    }

    /// Take a token: what can be told, and whether a stop text ends the answer.
    pub fn push(&mut self, token: u32) -> (String, bool) {
        self.pending.push(token);
        match self.stream.step(token) {
            Ok(Some(more)) => {
                self.held += &more;
                self.pending.clear();
            }
            Ok(None) => {}
            Err(_) => {
                self.stream = self.tokenizer.decode_stream(true);
                self.complete();
            }
        }
        self.tell(false)
    }

    /// The answer is over: what was held back, an unfinished character as U+FFFD.
    pub fn rest(&mut self) -> (String, bool) {
        self.complete();
        self.tell(true)
    }

    fn complete(&mut self) {
        self.held += &self.tokenizer.decode(&self.pending, true).unwrap_or_default();
        self.pending.clear();
    }

    fn tell(&mut self, last: bool) -> (String, bool) {
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let beginning = |s: &String| s.char_indices().map(|(n, _)| n).skip(1).filter(|n| self.held.ends_with(&s[..*n])).max();
        let keep = if last { 0 } else { self.stops.iter().filter_map(beginning).max().unwrap_or(0) };
        let held = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, held), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Text {
        Text::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../dispatch/data/tiny")).unwrap()
    }

    fn told(text: &Text, answer: &str, stops: &[&str]) -> (Vec<String>, bool) {
        let mut a = AnswerText::new(text, stops.iter().map(ToString::to_string).collect());
        let mut parts = Vec::new();
        for id in text.encode(answer).unwrap() {
            let (more, over) = a.push(id);
            parts.push(more);
            if over {
                return (parts, true);
            }
        }
        let (more, over) = a.rest();
        parts.push(more);
        (parts, over)
    }

    #[test]
    fn parts_make_the_whole_and_hold_whole_characters() {
        let text = tiny();
        for sample in SAMPLES {
            let (parts, over) = told(&text, sample, &[]);
            assert_eq!(parts.concat(), sample);
            assert!(!over && !parts.concat().contains('\u{FFFD}'));
        }
    }

    #[test]
    fn a_stop_text_ends_the_answer_wherever_it_is_cut() {
        let text = tiny();
        let answer = "你好，世界。👩🏽‍🚀 and the end";
        let cuts: Vec<usize> = answer.char_indices().map(|(i, _)| i).collect();
        for (n, &begin) in cuts.iter().enumerate() {
            for &end in &cuts[n + 1..] {
                let stop = &answer[begin..end];
                let (parts, over) = told(&text, answer, &[stop, "nothing of this"]);
                assert!(over);
                assert_eq!(parts.concat(), answer[..answer.find(stop).unwrap()]);
            }
        }
    }

    #[test]
    fn what_only_begins_like_a_stop_text_is_told() {
        let text = tiny();
        assert_eq!(told(&text, "and the en", &["end", "the ends"]).0.concat(), "and the en");
    }

    #[test]
    fn an_unfinished_character_ends_as_a_replacement() {
        let text = tiny();
        let ids = text.encode("👩").unwrap();
        let mut a = AnswerText::new(&text, vec![]);
        assert!(ids[..ids.len() - 1].iter().all(|&id| a.push(id).0.is_empty()));
        assert_eq!(a.rest().0, "\u{FFFD}");
    }

    #[test]
    fn tokens_are_bytes() {
        let text = tiny();
        for sample in SAMPLES {
            let bytes: Vec<u8> = text.encode(sample).unwrap().iter().flat_map(|&id| text.token_bytes(id)).collect();
            assert_eq!(bytes, sample.as_bytes());
        }
        assert_eq!(text.token_bytes(0), b"<bos>");
    }
}
