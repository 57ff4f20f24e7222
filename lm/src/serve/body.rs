//! Bodies of requests, as many bytes of them at once as there is room for.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderMap, HeaderValue, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::api_error::{ApiError, ApiResult};

/// The time that a body has to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

/// The body of a request.
pub(super) struct RequestBody {
    pub(super) bytes: Vec<u8>,
    /// Gives its bytes back to others.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

impl RequestBody {
    /// Reads a body of up to `most` bytes, which is said to be JSON.
    pub(super) async fn read(
        room: &Arc<Semaphore>,
        most: usize,
        headers: &HeaderMap,
        body: Body,
    ) -> ApiResult<Self> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if kind != "application/json" && !(kind.starts_with("application/") && kind.ends_with("+json")) {
            return Err(ApiError::not_json());
        }
        let is_plain = |encoding: &HeaderValue| encoding.as_bytes().eq_ignore_ascii_case(b"identity");
        if !headers.get_all(header::CONTENT_ENCODING).iter().all(is_plain) {
            return Err(ApiError::encoded());
        }
        let declared =
            headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|declared| declared > most as u64) {
            return Err(ApiError::too_large(most));
        }
        let whole = Self::collect(room, body, most);
        timeout(BODY_TIME, whole).await.unwrap_or_else(|_| Err(ApiError::slow_body()))
    }

    /// Reads up to `most` bytes, as long as there is room for them beside those of other bodies.
    async fn collect(room: &Arc<Semaphore>, body: Body, most: usize) -> ApiResult<Self> {
        let mut body = std::pin::pin!(body);
        let mut whole = Self { bytes: Vec::new(), permit: None };
        while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
            let Ok(data) = frame.map_err(|_| ApiError::slow_body())?.into_data() else { continue };
            if whole.bytes.len() + data.len() > most {
                return Err(ApiError::too_large(most));
            }
            let taken =
                u32::try_from(data.len()).ok().and_then(|len| room.clone().try_acquire_many_owned(len).ok());
            let taken = taken.ok_or_else(|| {
                ApiError::busy("The bodies of other requests take all the room.", Duration::from_secs(1))
            })?;
            match &mut whole.permit {
                Some(permit) => permit.merge(taken),
                permit => *permit = Some(taken),
            }
            whole.bytes.extend_from_slice(&data);
        }
        Ok(whole)
    }
}
