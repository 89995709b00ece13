//! gRPC endpoints of single models: which are open and where, and the orders to open and to close one while the server
//! runs. A call that came over such an endpoint carries the name of its model and reaches no other one, so that a
//! contract that names no model can be spoken to each of several.
//! Not here: what is answered on them (`server`), and when one is opened (the configuration and its reload).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tower_layer::Layer;
use tower_service::Service;

/// The open endpoints of single models. Shared by the server, which answers on them, and those who open, close and show
/// them.
#[derive(Debug)]
pub struct ModelEndpoints {
    /// The address of each open endpoint, by the model's name.
    open: Mutex<BTreeMap<String, SocketAddr>>,
    /// As many orders as configurations are read, so it needs no bound.
    orders: UnboundedSender<Order>,
    /// Taken by the server.
    inbox: Mutex<Option<UnboundedReceiver<Order>>>,
}

/// What the server is told.
#[derive(Debug)]
pub(super) enum Order {
    /// Answer for this model on this listener.
    Open(String, TcpListener),
    /// Answer no new calls for this model on an endpoint of its own.
    Close(String),
}

impl ModelEndpoints {
    /// Creates a set without endpoints.
    pub fn new() -> Arc<ModelEndpoints> {
        let (orders, inbox) = mpsc::unbounded_channel();
        Arc::new(ModelEndpoints { open: Mutex::default(), orders, inbox: Mutex::new(Some(inbox)) })
    }

    /// Opens an endpoint of the model of this name, or replaces the one that it has. The server answers on it as soon as
    /// it runs; the model need not be served.
    ///
    /// # Errors
    /// If the listener has no address.
    pub fn open(&self, model: &str, listener: TcpListener) -> std::io::Result<SocketAddr> {
        let address = listener.local_addr()?;
        self.locked().insert(model.to_owned(), address);
        // A server that has ended needs no order.
        let _ = self.orders.send(Order::Open(model.to_owned(), listener));
        Ok(address)
    }

    /// Closes the endpoint of the model of this name, if it has one; streams that run on it go on.
    pub fn close(&self, model: &str) {
        if self.locked().remove(model).is_some() {
            let _ = self.orders.send(Order::Close(model.to_owned()));
        }
    }

    /// Returns the address of the endpoint of the model of this name, if it has one.
    pub fn address(&self, model: &str) -> Option<SocketAddr> {
        self.locked().get(model).copied()
    }

    /// Returns the orders, once: for the server.
    pub(super) fn orders(&self) -> Option<UnboundedReceiver<Order>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, SocketAddr>> {
        // Each change is a single operation.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The model of the endpoint over which a call came, in the call's extensions; absent for the endpoint of all models.
#[derive(Clone, Debug)]
pub(super) struct OnlyModel(pub(super) Arc<str>);

/// Says in the extensions of each call over an endpoint which model the endpoint belongs to, if to one.
#[derive(Clone, Debug)]
pub(super) struct OfModel(pub(super) Option<Arc<str>>);

impl<S> Layer<S> for OfModel {
    type Service = Bound<S>;

    fn layer(&self, inner: S) -> Bound<S> {
        Bound { model: self.0.clone(), inner }
    }
}

/// A service behind [`OfModel`].
#[derive(Clone, Debug)]
pub(super) struct Bound<S> {
    model: Option<Arc<str>>,
    inner: S,
}

impl<B, S: Service<http::Request<B>>> Service<http::Request<B>> for Bound<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<B>) -> S::Future {
        if let Some(model) = &self.model {
            request.extensions_mut().insert(OnlyModel(Arc::clone(model)));
        }
        self.inner.call(request)
    }
}
